"""Unfamiliar inputs: pictures from elsewhere, read one at a time in the size and the colours of a data set."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data import EpochKey, ExampleReader, StreamedExamples, TensorExamples
from featureflock.data.image_files import ImageFiles
from featureflock.evaluation.images import Bytes, to_rgb

_GREY = (0.299, 0.587, 0.114)
_NOISE = 0x401
"""Which random numbers are for what."""


@dataclass(frozen=True, eq=False)
class OODImages(ExampleReader):
    """Brings ordinary pictures, (H, W, 3) in RGB, into the format of another data set."""

    picture: Callable[[int], Bytes]
    count: int
    source: str
    """What tells whether the pictures are the same as before."""
    shape: tuple[int, ...]
    """(C, H, W), as the network wants it."""
    white: int

    @classmethod
    def like(
        cls, test: TensorExamples | StreamedExamples, picture: Callable[[int], Bytes], count: int, source: str
    ) -> Self:
        white = test.white if isinstance(test, TensorExamples) else 255
        return cls(picture, count, source, test.shape, white)

    def read(self, index: int, key: EpochKey | None) -> Tensor:
        x = torch.from_numpy(np.array(self.picture(index))).permute(2, 0, 1).float()
        channels, *size = self.shape
        if channels == 1:
            x = (x * torch.tensor(_GREY).view(3, 1, 1)).sum(0, keepdim=True)
        if list(x.shape[1:]) != size:
            x = F.interpolate(x[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
        return (x * (self.white / 255)).round().clamp(0, self.white).to(torch.uint8)

    def name(self, index: int) -> str:
        return f"picture {index}"

    def digest(self) -> str:
        return self.source

    def identity(self) -> str:
        return f"{self.source} {self.shape} {self.white}"


@dataclass(frozen=True)
class Noise:
    """Every byte by chance."""

    shape: tuple[int, ...]

    def __call__(self, index: int) -> Bytes:
        noise: Bytes = np.random.default_rng((_NOISE, index)).integers(0, 256, self.shape, dtype=np.uint8)
        return noise


@dataclass(frozen=True, eq=False)
class Stored:
    """Of a published data set, (N, C, H, W) in bytes."""

    x: Tensor

    def __call__(self, index: int) -> Bytes:
        picture: Bytes = to_rgb(self.x[index : index + 1], 255)[0]
        return picture


@dataclass(frozen=True)
class Files:
    """Of a folder; each the largest square in its centre."""

    files: ImageFiles

    def __call__(self, index: int) -> Bytes:
        picture: Bytes = self.files.read(index, None).permute(1, 2, 0).numpy()
        return picture
