"""Conversion between a data set's own format and RGB images: bytes (B, H, W, 3), 0 black and 255 white.

A grey image becomes three equal channels and is reduced to one of them afterwards. Images smaller than corruptions are
designed for, such as digits of 8 × 8, are enlarged by an integer factor to at least 32 pixels, and the result is
averaged over each original pixel. Out-of-distribution images are converted when they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.corruptions.images import Bytes
from featureflock.data import EpochKey, ExampleReader, Examples, Stream, StreamedExamples, TensorExamples
from featureflock.data.image_files import ImageFiles, read_classes
from featureflock.data.sources.cache import load
from featureflock.data.sources.registry import PUBLISHED_SETS

NOISE = "noise"
_SMALL, _ENLARGED = 24, 32
_GREY = (0.299, 0.587, 0.114)


def are_images(examples: Examples) -> bool:
    """Whether the inputs are grey or colour images, as bytes or read from files."""
    shape, numbers = examples.shape, isinstance(examples, TensorExamples) and examples.x.dtype != torch.uint8
    return not numbers and len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) > 1


def displayable(examples: Examples) -> Bytes:
    """All examples as RGB images. Values without a known range are stretched, each image separately."""
    if are_images(examples) and isinstance(examples, TensorExamples):
        return to_rgb(examples.x, examples.white)
    if isinstance(examples, StreamedExamples) and isinstance(examples.reader, OODImages):
        reader = examples.reader
        return to_rgb(torch.stack([reader.read(index, None) for index in examples.indices.tolist()]), reader.white)
    (batch,) = examples.batches([torch.arange(len(examples))], torch.device("cpu"))
    x = batch.x.float()
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(f"Inputs of shape {tuple(x.shape[1:])} are not images and cannot be displayed.")
    if isinstance(examples, StreamedExamples) and (scale := examples.normalisation) is not None:
        x = x * torch.tensor(scale.std).view(-1, 1, 1) + torch.tensor(scale.mean).view(-1, 1, 1)
    elif x.min() >= 0 and x.max() <= 1:
        x = 255 * x
    else:
        low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
        x = 255 * (x - low) / (high - low).clamp_min(1e-12)
    return to_rgb(x.round().clamp(0, 255).to(torch.uint8), 255)


def transformed(examples: TensorExamples, transform: Callable[[Bytes], Bytes]) -> TensorExamples:
    """The examples after a transform of their RGB images, in their own format."""
    rgb = to_rgb(examples.x, examples.white)
    factor = 1 if min(rgb.shape[1:3]) >= _SMALL else -(-_ENLARGED // min(rgb.shape[1:3]))
    large = np.ascontiguousarray(rgb.repeat(factor, 1).repeat(factor, 2))
    x = torch.from_numpy(np.ascontiguousarray(transform(large))).permute(0, 3, 1, 2)
    x = x[:, 1:2] if examples.shape[0] == 1 else x
    x = F.avg_pool2d(x.float(), factor) if factor > 1 else x
    x = x if examples.white == 255 else x.float() * (examples.white / 255)
    return TensorExamples(x, examples.labels, normalisation=examples.normalisation, white=examples.white)


def to_rgb(x: Tensor, white: int) -> Bytes:
    """Images (B, C, H, W) with bytes from 0 to `white`, as RGB."""
    x = x.cpu() if white == 255 else (x.cpu().float() * (255 / white)).round().clamp(0, 255).to(torch.uint8)
    return x.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


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
