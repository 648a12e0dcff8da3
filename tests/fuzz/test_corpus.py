"""Cases that once hung, took all memory, raised other exceptions or gave wrong results, and their relatives."""

import json
import math
import os
import resource
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.published_formats import idx_files, pickled_files, random_arrays
from PIL import Image

import featureflock as ff
from featureflock.data.image_files import ImageFiles
from featureflock.data.sources.archives import DataFile
from featureflock.data.sources.formats import CIFAR10_BATCHES, idx_layout
from featureflock.evaluation import ece, reliability
from featureflock.evaluation.results import EvaluationResults
from featureflock.evaluation.runs import read_run
from featureflock.training import Recipe, train
from featureflock.training.checkpoint import read_newest
from fuzz import files
from fuzz.attempts import attempt
from fuzz.mutations import BRACKETS
from fuzz.readers import IMAGES, RUN_FILES

CONTENTS = {
    "empty": b"",
    "brackets": BRACKETS.encode(),
    "braces": b'{"a":' * 50_000,
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "text": b'"text"',
    "number": b"3",
    "NaN": b'{"epoch": NaN}',
    "infinity": b"1e999",
    "digits": b"9" * 10_000,
    "not UTF-8": b'{"a": "\xff"}',
    "zeros": bytes(1000),
    "lines": b"\n" * 1000,
}


@contextmanager
def limited_memory(size: int = 2**31) -> Iterator[None]:
    """Limit what may be allocated in addition."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(function) -> str:
    """The message with which a call is refused, in time and with little memory."""
    messages = []

    def call():
        try:
            function()
        except (ValueError, OSError) as error:
            messages.append(str(error))
            raise

    with limited_memory():
        assert attempt(call) is None
    assert messages, "It was not refused."
    return messages[0]


@pytest.mark.parametrize("name", RUN_FILES)
def test_files_of_a_run_with_other_content(name):
    path = files.run() / name
    read_run(files.run())
    for content in CONTENTS.values():
        with files.content(path, content):
            assert name in refused(lambda: read_run(files.run()))
        if name != "manifest.json":
            with files.sealed(path, content):
                run = attempt(lambda: read_run(files.run()))
                assert run is None or name == "metrics.jsonl" or content == b"[]"


def test_other_json_files_with_other_content():
    index = files.run() / "ensemble" / "ensemble.json"
    for content in CONTENTS.values():
        with files.content(index, content):
            assert "ensemble.json" in refused(lambda: ff.load(files.run() / "ensemble"))
        with files.content(files.results(), content):
            assert "results.json" in refused(lambda: EvaluationResults.read(files.results()))
    for value in (None, 3, [], "text", {"class": "os.system"}, {"class": "Recipe", "epochs": math.nan}):
        refused(lambda value=value: Recipe.from_json(value))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": "featureflock checkpoint", "version": 1, "sha256": ""}', BRACKETS]
)
def test_checkpoints_with_a_valid_header_and_nothing_else(tmp_path, content):
    shutil.copytree(files.run() / "checkpoints", tmp_path, dirs_exist_ok=True)
    older, newest = sorted(tmp_path.iterdir())
    (newest / "checkpoint.json").write_text(content)
    found, messages = read_newest(tmp_path)
    assert found.metadata["step"] == int(older.stem.split("-")[1])
    assert newest.with_suffix(".damaged").exists()
    assert "is damaged and was renamed" in messages[0]


@contextmanager
def replaced(path: Path, kind: str) -> Iterator[None]:
    """Replace a file by something that is no regular file."""
    aside = path.with_name(f"aside-{path.name}")
    path.rename(aside)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to(kind)
    try:
        yield
    finally:
        path.rmdir() if kind == "folder" else path.unlink()
        aside.rename(path)


SPECIAL = ("pipe", "folder", "loop", "/dev/zero", "/dev/full")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="This platform has no pipes.")
@pytest.mark.parametrize("kind", SPECIAL, ids=[kind.rsplit("/", 1)[-1] for kind in SPECIAL])
def test_what_is_no_file_neither_hangs_nor_fills_the_memory(kind):
    run = files.run()
    (weights,) = (run / "ensemble").glob("*.safetensors")
    for path, function in (
        *((run / name, lambda: read_run(run)) for name in RUN_FILES),
        (weights, lambda: ff.load(run / "ensemble")),
        (run / "ensemble" / "ensemble.json", lambda: ff.load(run / "ensemble")),
        (files.results(), lambda: EvaluationResults.read(files.results())),
        (files.image("png"), lambda: IMAGES.read(files.image("png"))),
        (max((run / "checkpoints").iterdir()) / "checkpoint.json", lambda: read_newest(run / "checkpoints")),
    ):
        with replaced(path, kind):
            refused(function)


def test_pickles_that_would_take_all_memory_or_run_code():
    contents = pickled_files("cifar10", random_arrays("cifar10", 10, 2))
    for pickle in (
        b"\x80\x02r\xff\xff\xff\x7f.",  # an entry number of two thousand million
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40),  # bytes of a terabyte
        b"\x80\x02]" + b"2" * 10_000 + b".",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02" + b"(" * 50_000 + b".",
        b"\x80\x02}" + b"\x85" * 50_000 + b".",
    ):
        data = {name: DataFile(name, each) for name, each in contents.items()} | {
            "test_batch": DataFile("test", pickle)
        }
        assert "test" in refused(lambda data=data: CIFAR10_BATCHES.read(data, (32, 32, 3), 10))


def test_idx_headers_that_declare_too_much():
    contents = idx_files(random_arrays("mnist", 5, 2))
    for shape in ((2**32 - 1, 2**32 - 1, 2**32 - 1), (0, 28, 28), (5, 28, 2**31)):
        header = b"\0\0\x08\x03" + struct.pack(">3I", *shape)
        data = contents | {"train-images-idx3-ubyte": header + bytes(100)}
        data = {name: DataFile(name, each) for name, each in data.items()}
        assert "train-images" in refused(lambda data=data: idx_layout("mnist.zip").read(data, (28, 28, 1), 10))


@pytest.mark.parametrize("size", [(1, 1_000_000), (1_000_000, 1), (1, 20_000), (30_000, 1), (65_535, 2)], ids=str)
def test_images_that_are_a_line(size, tmp_path):
    """They are small files, but scaled to the shorter side of a network's input they would be gigabytes."""
    path = tmp_path / "line.png"
    Image.new("RGB", size).save(path)
    reader = ImageFiles(str(tmp_path), ("line.png",), 16)
    for function in (lambda: IMAGES.read(path)[0], lambda: reader.read(0, None)):
        with limited_memory(2**28):
            read = attempt(function)
        assert read is None or np.asarray(read).size == 3 * 16 * 16


def test_many_bins():
    probs, labels = torch.tensor([[0.3, 0.7], [0.6, 0.4]]), torch.tensor([0, 1])
    for bins in (10**9, 2**63, 10**30, -1, 0, 2.5, "15", None, True):
        for function in (ece, reliability):
            refused(lambda function=function, bins=bins: function(probs, labels, bins))


def test_resuming_with_files_of_another_run(tmp_path):
    shutil.copytree(files.unfinished_run(), tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    recipe["seed"] = 7
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe))
    assert "another recipe" in refused(lambda: train(files.RECIPE, tmp_path / "run", resume=True))
