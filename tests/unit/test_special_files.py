"""Files that a user names, or that are in a folder that a user names: pipes, devices and sockets, and permissions."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.corrupted_files import published
from helpers.hostile_files import SPECIAL
from helpers.limits import time_limit, within_memory
from helpers.made_evaluations import make_images, make_results
from helpers.small_ensembles import train_small

import featureflock as ff
from featureflock.corruptions import open_set
from featureflock.data import InputFormat
from featureflock.evaluation.human_labels import read_human_labels
from featureflock.evaluation.runs import read_run
from featureflock.evaluation.tables_of_inputs import read_rows
from featureflock.methods import FeatureWGD
from featureflock.reports.write import read_report, write_report
from featureflock.training import checkpoint

COLUMNS = InputFormat((2,), "float32", None, 255, 1.0, 1, (), ("width", "height"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), [FeatureWGD()], [0], epochs=1)[0]


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def weights(run: Path) -> Path:
    (path,) = (run / "ensemble").glob("weights-*")
    return path


def report(folder: Path) -> Path:
    results = make_results(["Deep Ensembles"])
    write_report(results, make_images(results), folder)
    return folder


READERS = {
    "weights": (weights, lambda run: ff.load(run / "ensemble")),
    "index of an ensemble": (lambda run: run / "ensemble" / "ensemble.json", lambda run: ff.load(run / "ensemble")),
    "recipe": (lambda run: run / "recipe.json", read_run),
    "environment": (lambda run: run / "environment.json", read_run),
    "metrics": (lambda run: run / "metrics.jsonl", read_run),
    "checkpoint": (
        lambda run: sorted((run / "checkpoints").iterdir())[-1] / "checkpoint.json",
        lambda run: [checkpoint.read_newest(run / "checkpoints"), _raise_if_renamed(run)],
    ),
    "tensors of a checkpoint": (
        lambda run: sorted((run / "checkpoints").iterdir())[-1] / "0.safetensors",
        lambda run: [checkpoint.read_newest(run / "checkpoints"), _raise_if_renamed(run)],
    ),
    "human labels": (
        lambda run: run / "human.npy",
        lambda run: read_human_labels(run / "human.npy", torch.zeros(3, dtype=torch.int64), 2),
    ),
    "table": (lambda run: run / "rows.csv", lambda run: read_rows(run / "rows.csv", COLUMNS)),
    "results": (lambda run: report(run / "page") / "results.json", lambda run: read_report(run / "page")),
    "image of a report": (
        lambda run: report(run / "page") / "images" / "maps.png",
        lambda run: read_report(run / "page"),
    ),
    "corrupted labels": (
        lambda run: published(run / "c", names=["fog"]) and run / "c" / "labels.npy",
        lambda run: open_set(run / "c"),
    ),
    "manifest": (
        lambda run: published(run / "c", names=["fog"]) and run / "c" / "featureflock.json",
        lambda run: open_set(run / "c"),
    ),
}
"""By kind: a function of the run folder that returns a file, and one that reads it."""


def _raise_if_renamed(run):
    if any((run / "checkpoints").glob("*.damaged")):
        raise ValueError("the checkpoint is not a regular file, was renamed and not used")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_refused_at_once(run, reader, kind):
    find, read = READERS[reader]
    path = find(run)
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    with time_limit(), pytest.raises((ValueError, OSError)) as caught:
        read(run)
    assert "\n" not in str(caught.value)


def test_weights_linked_to_an_endless_device_take_no_memory(run):
    path = weights(run)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert within_memory(200, lambda: ff.load(run / "ensemble")) == f"{path} is not a regular file."


def test_a_table_in_one_endless_line_takes_little_memory(tmp_path):
    with open(tmp_path / "rows.csv", "wb") as file:
        file.write(b"width,height\n")
        file.truncate(10**10)
    message = within_memory(100, lambda: read_rows(tmp_path / "rows.csv", COLUMNS))
    assert message.endswith("rows.csv cannot be read as a CSV file (a line is longer than 1,048,576 characters).")


def test_numbers_that_float32_does_not_have_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("height,width\n2,1\n1e39,4\n")
    with pytest.raises(ValueError, match=r"row 2: height must be a finite number; got '1e39'"):
        read_rows(tmp_path / "rows.csv", COLUMNS)
    (tmp_path / "rows.csv").write_text("height,width\n2,1\n-3e38,4\n")
    assert torch.equal(read_rows(tmp_path / "rows.csv", COLUMNS), torch.tensor([[1.0, 2.0], [4.0, -3e38]]))


def test_a_header_that_declares_terabytes_takes_no_memory(tmp_path):
    """An .npy file of 128 bytes with a shape of 10¹² × 2."""
    path = tmp_path / "human.npy"
    with open(path, "wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 2)}
        np.lib.format.write_array_header_1_0(file, header)
    labels = torch.zeros(3, dtype=torch.int64)
    assert "human.npy is damaged" in within_memory(100, lambda: read_human_labels(path, labels, 2))


# ---- permissions


@pytest.fixture
def public_folder():
    """A folder that other users may enter; that of pytest belongs to one user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


class AsUser:
    """Without the rights of the superuser, if the tests run with them."""

    def __enter__(self):
        self.before = os.geteuid()
        if self.before == 0:
            os.seteuid(65534)

    def __exit__(self, *_):
        os.seteuid(self.before)


@pytest.mark.parametrize(
    "name", ["recipe.json", "result.json", "ensemble/ensemble.json", "ensemble/weights", "ensemble"]
)
def test_without_permission_the_advice_is_to_change_it(trained, public_folder, name):
    """And not to train the run again."""
    run = shutil.copytree(trained, public_folder / "run")
    path = weights(run) if name.endswith("weights") else run / name
    path.chmod(0)
    try:
        with AsUser(), pytest.raises(OSError, match="ermission") as caught:
            read_run(run).load_ensemble()
    finally:
        path.chmod(0o755)
    text = str(caught.value).lower()
    assert "again" not in text
    assert "damaged" not in text
