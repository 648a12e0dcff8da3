"""Image files are decoded once per row of the mesh, with the same training as when every process decodes them all."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.meshes import finish, start
from PIL import Image
from torch import Tensor, nn

from featureflock.data import CustomData
from featureflock.data.image_files import ImageFiles, read_classes
from featureflock.data.streaming import StreamedExamples
from featureflock.distributed.mesh import MeshShape, join_mesh
from featureflock.methods import FeatureWGD
from featureflock.models import CustomModelConfig
from featureflock.training import ComputeConfig, Recipe, train

CLASSES, BATCH, EPOCHS = ("cat", "dog", "owl"), 5, 2
DAMAGED = "dog/1.png"


class Small(nn.Sequential):
    feature_dim = 4

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def write_images(folder: Path) -> None:
    """13 images per class, of which one cannot be read: the last batch of an epoch has 4 of 39 examples."""
    random = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(13):
            pixels = random.integers(0, 256, (12 + i % 3, 14, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    (folder / DAMAGED).write_bytes(b"not an image")


def train_images(images: Path, run: Path, log: Path, shape: tuple[int, int], every_process_reads_all: bool) -> None:
    """Train on a mesh. Each process writes the files that it reads for training to a file of its own."""
    read, reads = ImageFiles.read, []

    def logged(self: ImageFiles, index: int, key: object) -> Tensor:
        if key is not None:
            reads.append([key.epoch, self.paths[index]])
        return read(self, index, key)

    ImageFiles.read = logged
    if every_process_reads_all:
        StreamedExamples.read_by = lambda self, row: self
    examples = read_classes(images, CLASSES, size=8, workers=0)
    data = CustomData(examples, examples.select(torch.arange(13)))
    recipe = Recipe(data, CustomModelConfig(Small), FeatureWGD(), members=4, epochs=EPOCHS, batch=BATCH)
    train(recipe, run, compute=ComputeConfig(compile="off", mesh=MeshShape(*shape, timeout=60)))
    log.mkdir(exist_ok=True)
    (log / os.environ.get("RANK", "0")).write_text(json.dumps(reads))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs on each mesh, by rows and by processes."""
    folder = tmp_path_factory.mktemp("rows")
    write_images(folder / "images")
    for shape, alone in ((shape, alone) for shape in ((2, 1), (2, 2)) for alone in (False, True)):
        name, count = f"{shape} {'process' if alone else 'row'}", shape[0] * shape[1]
        args = folder / "images", folder / name, folder / f"log {name}", shape, alone
        codes = finish(start(count, folder / f"output {name}", train_images, *args))
        assert codes == [0] * count, [path.read_text()[-2000:] for path in (folder / f"output {name}").iterdir()]
    return folder


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_the_training_is_that_of_processes_that_read_everything(folder, shape):
    runs = [folder / f"{shape} {how}" for how in ("row", "process")]
    weights = [sorted((run / "ensemble").glob("*.safetensors")) for run in runs]
    assert weights[0]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    for ours, theirs in zip(*lines, strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["unreadable"] == theirs["unreadable"] == 1


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_every_file_is_read_once_per_row(folder, shape):
    M, D = shape
    for how, times in (("row", 1), ("process", M)):
        logs = [json.loads((folder / f"log {shape} {how}" / str(rank)).read_text()) for rank in range(M * D)]
        counts = Counter(tuple(each) for log in logs for each in log)
        assert len(counts) == 39 * EPOCHS  # rows have different examples, and together all of them
        assert set(counts.values()) == {times}
    sizes = [len(json.loads((folder / f"log {shape} row" / str(rank)).read_text())) for rank in range(M * D)]
    assert min(sizes) >= 39 * EPOCHS // (M * D) // 2  # all of them take part


def gather_small_batches(folder: Path) -> None:
    """Batches of one example and of none that can be read, with three processes; examples of two shapes."""
    examples = read_classes(folder, CLASSES, size=8, workers=0)
    damaged = examples.reader.paths.index(DAMAGED)
    order = [torch.tensor([7]), torch.tensor([damaged]), torch.tensor([damaged, 3, 8, 9]), torch.arange(6)]
    alone = list(examples.batches(order, torch.device("cpu")))
    with join_mesh(MeshShape(timeout=30)) as mesh:
        shared = list(examples.read_by(mesh.members).batches(order, torch.device("cpu")))
        assert [len(batch.unreadable) for batch in shared] == [0, 1, 1, 0]
        for ours, theirs in zip(shared, alone, strict=True):
            assert torch.equal(ours.x, theirs.x)
            assert ours.x.dtype == theirs.x.dtype
            assert torch.equal(ours.y, theirs.y)
            assert ours.unreadable == theirs.unreadable
        mixed = _Mixed(torch.arange(6))
        with pytest.raises(ValueError, match="must have one shape and type"):
            list(mixed.read_by(mesh.members).batches([torch.arange(6)], torch.device("cpu")))


class _Mixed(StreamedExamples):
    """Inputs whose shape depends on the part of the batch."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__(_MixedReader(), labels)


class _MixedReader(ImageFiles):
    def __init__(self) -> None:
        super().__init__("", (), 8)

    def read(self, index: int, key: object) -> Tensor:
        return torch.zeros(2 + index // 2)


def test_small_batches_and_unreadable_examples(tmp_path):
    write_images(tmp_path / "images")
    codes = finish(start(3, tmp_path / "output", gather_small_batches, tmp_path / "images"))
    assert codes == [0, 0, 0], [path.read_text()[-2000:] for path in (tmp_path / "output").iterdir()]
