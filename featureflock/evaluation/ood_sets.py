"""Out-of-distribution images, converted to the size and colours of a data set when they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data import EpochKey, ExampleReader, Stream, StreamedExamples, TensorExamples
from featureflock.data.image_files import ImageFiles, read_classes
from featureflock.data.sources.cache import load
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.evaluation.images import Bytes, to_rgb

NOISE = "noise"
_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True, eq=False)
class OODImages(ExampleReader):
    """Reads RGB images (H, W, 3) in the format of another data set."""

    image: Callable[[int], Bytes]
    """The image with an index."""
    count: int
    source: str
    """Changes whenever the images change."""
    shape: tuple[int, ...]
    """(C, H, W) that the network expects."""
    white: int = 255
    """Value of white in the data set."""

    def read(self, index: int, key: EpochKey | None) -> Tensor:
        x = torch.from_numpy(np.array(self.image(index))).permute(2, 0, 1).float()
        channels, *size = self.shape
        if channels == 1:
            x = (x * torch.tensor(_GREY).view(3, 1, 1)).sum(0, keepdim=True)
        if list(x.shape[1:]) != size:
            x = F.interpolate(x[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
        return (x * (self.white / 255)).round().clamp(0, self.white).to(torch.uint8)

    def name(self, index: int) -> str:
        return f"image {index}"

    def digest(self) -> str:
        return self.source

    def identity(self) -> str:
        return f"{self.source} {self.shape} {self.white}"


def ood_images(name: str, test: TensorExamples | StreamedExamples, count: int) -> tuple[str, OODImages]:
    """The label and the reader of an OOD set: `count` images of uniform noise, a published data set, or a folder."""
    shape, folder = test.shape, Path(name).expanduser()
    white = test.white if isinstance(test, TensorExamples) else 255

    def noise(index: int) -> Bytes:
        return np.random.default_rng((Stream.OOD_NOISE, index)).integers(0, 256, (*shape[1:], 3), dtype=np.uint8)

    def file(index: int) -> Bytes:
        return files.read(index, None).permute(1, 2, 0).numpy()

    if name == NOISE:
        return name, OODImages(noise, count, f"noise {shape}", shape, white)
    if name in PUBLISHED_SETS:
        x, digest = (arrays := load(name)).test_x, arrays.digest
        return name, OODImages(lambda index: to_rgb(x[index : index + 1], 255)[0], len(x), digest, shape, white)
    if folder.is_dir():
        files = read_classes(folder, [""], size=max(shape[1:]), workers=0, margin=1.0).reader
        assert isinstance(files, ImageFiles)
        return folder.resolve().name, OODImages(file, len(files.paths), files.identity(), shape, white)
    raise ValueError(f"No OOD set {name!r}: give {NOISE}, one of {', '.join(PUBLISHED_SETS)}, or a folder.")
