"""Targets that read files."""

import csv
import io
import json
import shutil
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from helpers.published_formats import idx_files, pickled_files, png_files, random_arrays
from helpers.short_runs import SHORT, same, weights
from hypothesis import strategies as st

import featureflock as ff
from featureflock.corruptions.files import open_set
from featureflock.data.input_format import InputFormat
from featureflock.data.sources import cache as data_cache
from featureflock.data.sources.archives import DataFile
from featureflock.data.sources.formats import CIFAR10_BATCHES, CIFAR10_PNG_ROWS, idx_layout
from featureflock.evaluation.predictions import read_cache, write_cache
from featureflock.evaluation.results import EvaluationResults
from featureflock.evaluation.runs import read_run
from featureflock.evaluation.tables_of_inputs import read_rows
from featureflock.reports.write import write_report
from featureflock.training import Recipe, train
from featureflock.training.checkpoint import read_newest
from featureflock.training.checkpoint import write as write_checkpoint
from fuzz import files
from fuzz.attempts import attempt, target
from fuzz.mutations import damaged_bytes, damaged_json

RUN_FILES = ("recipe.json", "inputs.json", "environment.json", "metrics.jsonl", "result.json", "manifest.json")


def damaged(data, content: bytes) -> bytes:
    """Damaged bytes, or a damaged value if the content is JSON."""
    if content[:1] in b"[{" and data.draw(st.booleans()):
        try:
            return json.dumps(data.draw(damaged_json(json.loads(content)))).encode()
        except ValueError:
            lines = content.splitlines()
            k = data.draw(st.integers(0, len(lines) - 1))
            lines[k] = json.dumps(data.draw(damaged_json(json.loads(lines[k])))).encode()
            return b"\n".join(lines)
    return data.draw(damaged_bytes(content))


@target("checkpoint files")
def checkpoint(data) -> None:
    folder = files.SCRATCH / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files.run() / "checkpoints", folder)
    older, newest = sorted(folder.iterdir())
    intact = {each.metadata["step"]: each for each in _intact_checkpoints()}
    file = data.draw(st.sampled_from(sorted(newest.iterdir())))
    file.write_bytes(data.draw(damaged_bytes(file.read_bytes())))
    found = attempt(lambda: read_newest(folder))
    if found is not None:
        checkpoint, _ = found
        assert checkpoint is not None
        expected = intact[checkpoint.metadata["step"]]  # the damaged one only if it was not damaged after all
        assert checkpoint.metadata == expected.metadata
        assert all(torch.equal(checkpoint.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert older.exists()


@cache
def _intact_checkpoints():
    folder, found = files.SCRATCH / "intact", []
    shutil.copytree(files.run() / "checkpoints", folder)
    for path in sorted(folder.iterdir(), reverse=True):
        found.append(read_newest(folder)[0])
        shutil.rmtree(path)
    return found


@target("checkpoint metadata")
def checkpoint_metadata(data) -> None:
    """With a valid digest, as somebody could write it on purpose."""
    folder = files.SCRATCH / "metadata"
    shutil.rmtree(folder, ignore_errors=True)
    newest = _intact_checkpoints()[0]
    metadata = data.draw(damaged_json(newest.metadata))
    changed = type(newest)(newest.tensors, metadata)
    write_checkpoint(folder, 10, changed)
    found = attempt(lambda: read_newest(folder))
    assert found is None or isinstance(found[0].metadata["step"], int)


@target("saved ensembles")
def ensemble(data) -> None:
    path = data.draw(st.sampled_from(sorted((files.run() / "ensemble").iterdir())))
    x = torch.zeros(2, 64)
    with files.content(path, damaged(data, path.read_bytes())):
        ens = attempt(lambda: ff.load(files.run() / "ensemble"))
        if ens is not None and path.suffix == ".safetensors":
            attempt(lambda: ens.predict(x))


@target("run folders")
def run_folder(data) -> None:
    path = files.run() / data.draw(st.sampled_from(RUN_FILES))
    before = path.read_bytes()
    changed = damaged(data, before)
    with files.content(path, changed):
        run = attempt(lambda: read_run(files.run()))
    if run is not None and changed != before:  # the same value, in another spelling
        assert json.loads(changed) == json.loads(before), f"{path.name} was changed, and nobody noticed."


@target("run folders with a new manifest")
def sealed_run_folder(data) -> None:
    path = files.run() / data.draw(st.sampled_from(RUN_FILES[:-1]))
    with files.sealed(path, damaged(data, path.read_bytes())):
        run = attempt(lambda: read_run(files.run()))
        if run is not None:
            attempt(run.splits)
            attempt(run.load_ensemble)
            attempt(lambda: Recipe.from_json(run.recipe))


@target("recipes")
def recipe(data) -> None:
    value = data.draw(damaged_json(SHORT.to_json()))
    read = attempt(lambda: Recipe.from_json(value))
    assert read is None or Recipe.from_json(read.to_json()) == read


@target("results.json")
def results(data) -> None:
    path = files.results()
    with files.content(path, damaged(data, path.read_bytes())):
        read = attempt(lambda: EvaluationResults.read(path))
    assert read is None or EvaluationResults.from_json(read.to_json()) == read


def _layout(data, layout, contents, shape, classes) -> None:
    name = data.draw(st.sampled_from(sorted(contents)))
    changed = contents | {name: data.draw(damaged_bytes(contents[name]))}
    read = attempt(lambda: layout.read({key: DataFile(key, each) for key, each in changed.items()}, shape, classes))
    if read is not None:
        assert all(array.dtype == np.uint8 for array in read.values())
        assert all(len(read[f"{split}_x"]) == len(read[f"{split}_y"]) for split in ("train", "test"))
        assert all(read[f"{split}_y"].max(initial=0) < classes for split in ("train", "test"))


@target("idx files")
def idx(data) -> None:
    _layout(data, idx_layout("mnist.zip"), idx_files(random_arrays("mnist", 5, 2)), (28, 28, 1), 10)


@target("CIFAR batches")
def batches(data) -> None:
    _layout(data, CIFAR10_BATCHES, pickled_files("cifar10", random_arrays("cifar10", 10, 2)), (32, 32, 3), 10)


@target("CIFAR as PNG rows")
def png_rows(data) -> None:
    _layout(data, CIFAR10_PNG_ROWS, png_files(random_arrays("cifar10", 10, 2)), (32, 32, 3), 10)


@target("corrupted sets (.npy)")
def corrupted_set(data) -> None:
    folder = files.corrupted_set()
    path = folder / data.draw(st.sampled_from(["labels.npy", "frost.npy"]))
    changed = data.draw(damaged_bytes(path.read_bytes()))
    with files.content(path, changed):
        opened = attempt(lambda: open_set(folder))
        if opened is not None:
            attempt(lambda: np.array(opened.images("frost", 3)))


IMAGES = InputFormat((3, 16, 16), "uint8", None, 255, 1.0, 10, ())
ROWS = InputFormat((3,), "float32", None, 255, 1.0, 1, (), ("a", "b", "c"))


@target("images")
def image(data) -> None:
    path = files.image(data.draw(st.sampled_from(["png", "jpg", "gif", "bmp", "tiff", "webp", "ppm", "ico"])))
    with files.content(path, data.draw(damaged_bytes(path.read_bytes()))):
        read = attempt(lambda: IMAGES.read(path))
    if read is not None:
        assert IMAGES.batch([read[0]]).shape == (1, 3, 16, 16)


@target("tables (.csv)")
def table(data) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["a", "b", "c"], *[[k, k / 2, -k] for k in range(5)]])
    path = files.SCRATCH / "table.csv"
    path.write_bytes(data.draw(damaged_bytes(text.getvalue().encode())))
    rows = attempt(lambda: read_rows(path, ROWS))
    assert rows is None or rows.isfinite().all()


@target("cached data sets")
def cached_data(data) -> None:
    path = _cached()
    changed = data.draw(damaged_bytes(path.read_bytes()))
    expected = safetensors.torch.load(path.read_bytes())
    with files.content(path, changed):
        read = attempt(lambda: data_cache.load("cifar10"))
    if read is not None:
        assert torch.equal(read.train_y, expected["train_y"].long())
        assert torch.equal(read.train_x.permute(0, 2, 3, 1), expected["train_x"])


@cache
def _cached() -> Path:
    return data_cache.store("cifar10", random_arrays("cifar10", 4, 2), source="random", published=False)


@target("reports from results.json")
def report(data) -> None:
    """A value that was changed on purpose may be a result, and then it can be shown."""
    path = files.results()
    with files.content(path, json.dumps(data.draw(damaged_json(json.loads(path.read_bytes())))).encode()):
        results = attempt(lambda: EvaluationResults.read(path))
    if results is not None:
        png = files.image("png")
        page = attempt(lambda: write_report(results, defaultdict(png.read_bytes), files.SCRATCH / "report"))
        assert page is None or b"<script>alert" not in page.read_bytes()


@target("resuming a run")
def resume(data) -> None:
    """An unfinished run, one of whose files was changed. A result is that of the run without the change."""
    folder = files.SCRATCH / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files.unfinished_run(), folder)
    names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    path = data.draw(st.sampled_from(names))
    path.write_bytes(damaged(data, path.read_bytes()))
    if attempt(lambda: train(files.RECIPE, folder, resume=True)) is not None:
        assert same(weights(folder), weights(files.run()))


@target("cached predictions")
def cached_predictions(data) -> None:
    run, tensors = read_run(files.run()), {"log_probs": torch.linspace(-9, 0, 120).view(3, 4, 10)}
    path = run.folder.predictions / "clean.safetensors"
    if not path.exists():
        write_cache(run, "clean", "identity", tensors)
    with files.content(path, data.draw(damaged_bytes(path.read_bytes()))):
        read = attempt(lambda: read_cache(run, "clean", "identity", tuple(tensors)))
    assert read is None or all(torch.equal(read[name], tensors[name]) for name in tensors)
