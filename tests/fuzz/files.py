"""Valid files to damage, made once per process, and a context in which one of them has other content."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from helpers.corrupted_files import published
from helpers.made_evaluations import make_results
from helpers.short_runs import SHORT
from PIL import Image

from featureflock.training import train
from featureflock.training.manifest import write_manifest
from featureflock.training.run_folder import RunFolder

_folder = tempfile.TemporaryDirectory(prefix="featureflock-fuzz-")
SCRATCH = Path(_folder.name)


RECIPE = replace(SHORT, epochs=2, subset=100, batch=50)


@cache
def run() -> Path:
    """A finished run, with two checkpoints."""
    train(RECIPE, SCRATCH / "run")
    return SCRATCH / "run"


@cache
def unfinished_run() -> Path:
    """The same run, as it was before its last epoch."""
    folder = shutil.copytree(run(), SCRATCH / "unfinished")
    for name in ("manifest.json", "result.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "ensemble")
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:1]))
    return folder


@cache
def results() -> Path:
    """The results of an evaluation."""
    path = SCRATCH / "results.json"
    path.write_text(json.dumps(make_results(seeds=(0,), corruptions=("fog",), severities=(1,)).to_json()))
    return path


@cache
def corrupted_set() -> Path:
    """A folder in the layout of CIFAR-10-C."""
    published(SCRATCH / "corrupted", count=2)
    return SCRATCH / "corrupted"


@cache
def image(kind: str) -> Path:
    """A small image file."""
    path = SCRATCH / f"image.{kind}"
    Image.linear_gradient("L").resize((20, 24)).convert("RGB").save(path)
    return path


@contextmanager
def content(path: Path, data: bytes) -> Iterator[None]:
    """Give a file other content for a while."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@contextmanager
def sealed(path: Path, data: bytes) -> Iterator[None]:
    """Give a file of the run other content, and the run a manifest that agrees with it."""
    folder = RunFolder(run())
    manifest = folder.path / "manifest.json"
    data_digests = json.loads(manifest.read_bytes())["data"]
    with content(path, data), content(manifest, manifest.read_bytes()):
        write_manifest(folder.path, folder.ensemble, data_digests)
        yield
