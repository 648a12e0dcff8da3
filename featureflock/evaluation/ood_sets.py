"""Out-of-distribution images, converted to the size and colours of a data set when they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data import EpochKey, ExampleReader, Stream, StreamedExamples, TensorExamples
from featureflock.data.image_files import ImageFiles
from featureflock.evaluation.images import Bytes, to_rgb

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
    white: int
    """Value of white in the data set."""

    @classmethod
    def like(
        cls, test: TensorExamples | StreamedExamples, image: Callable[[int], Bytes], count: int, source: str
    ) -> Self:
        """A reader in the format of a test set."""
        white = test.white if isinstance(test, TensorExamples) else 255
        return cls(image, count, source, test.shape, white)

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


@dataclass(frozen=True)
class NoiseImages:
    """Uniform noise: every byte is equally likely."""

    shape: tuple[int, ...]

    def __call__(self, index: int) -> Bytes:
        noise: Bytes = np.random.default_rng((Stream.OOD_NOISE, index)).integers(0, 256, self.shape, dtype=np.uint8)
        return noise


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of a published data set, bytes (N, C, H, W)."""

    x: Tensor

    def __call__(self, index: int) -> Bytes:
        image: Bytes = to_rgb(self.x[index : index + 1], 255)[0]
        return image


@dataclass(frozen=True)
class FolderImages:
    """Image files of a folder, each cropped to its central square."""

    files: ImageFiles

    def __call__(self, index: int) -> Bytes:
        image: Bytes = self.files.read(index, None).permute(1, 2, 0).numpy()
        return image
