"""Types and helpers shared by all corruptions.

Shapes: B images of H × W pixels with C = 3 channels, uint8 (B, H, W, C) as in the published files. Constants are those
of 32 × 32 images; lengths in pixels are multiplied by min(H, W) / 32 for other sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from featureflock.data.rng import cell_uniforms

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ImageRandom:
    """Random numbers seeded per image, by the keys and the index of the image, independent of the batch."""

    index_b: NDArray[np.int64]
    keys: tuple[int, ...]

    def uniform(self, low: float, high: float, *shape: int, stream: int = 0) -> Floats:
        """Uniform numbers between low and high, (B, *shape); `stream` separates the draws of one corruption."""
        return low + (high - low) * cell_uniforms(shape, self.index_b, *self.keys, stream)

    def normal(self, mean: float, std: float, *shape: int, stream: int = 0) -> Floats:
        """Normal numbers Φ⁻¹(uniform), (B, *shape)."""
        normals: Floats = mean + std * ndtri(cell_uniforms(shape, self.index_b, *self.keys, stream))
        return normals

    def below(self, bound: int, *shape: int, stream: int = 0) -> NDArray[np.int64]:
        """Integers in [0, bound), (B, *shape)."""
        return self.uniform(0, bound, *shape, stream=stream).astype(np.int64)


Corruption = Callable[[Bytes, int, ImageRandom], Bytes]
"""Maps images, severity and random numbers to corrupted images."""


def to_bytes(x: Floats | NDArray[np.float32]) -> Bytes:
    """Convert [0, 1] to bytes as published: clip, multiply by 255 and truncate, not round. Overwrites x."""
    np.clip(x, 0, 1, out=x)
    x *= 255
    return x.astype(np.uint8)


def relative_size(x_bhwc: Bytes) -> float:
    """Size of the images relative to 32 × 32."""
    return float(min(x_bhwc.shape[1:3])) / 32
