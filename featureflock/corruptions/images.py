"""What all corruptions share: pictures as arrays, the random numbers of each, and the way back to bytes.

Shapes: B pictures of H × W pixels with C = 3 channels, uint8, in the order (B, H, W, C) of the published files. The
constants are those of 32 × 32 pictures; lengths in pixels are multiplied by min(H, W) / 32 for others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featureflock.data.rng import cell_normals, cell_uniforms

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ImageRandom:
    """The random numbers of each picture: a function of the keys and of its index, whatever else is in the batch."""

    index_b: NDArray[np.int64]
    keys: tuple[int, ...]

    def uniform(self, low: float, high: float, *shape: int, stream: int = 0) -> Floats:
        """Between low and high, (B, *shape). One corruption's draws differ in their stream."""
        return low + (high - low) * cell_uniforms(shape, self.index_b, *self.keys, stream)

    def normal(self, mean: float, deviation: float, *shape: int, stream: int = 0) -> Floats:
        """(B, *shape)."""
        return mean + deviation * cell_normals(shape, self.index_b, *self.keys, stream)

    def below(self, bound: int, *shape: int, stream: int = 0) -> NDArray[np.int64]:
        """Integers from 0 to bound − 1, (B, *shape)."""
        return self.uniform(0, bound, *shape, stream=stream).astype(np.int64)


Corruption = Callable[[Bytes, int, ImageRandom], Bytes]
"""Pictures, severity and random numbers to pictures."""


def to_bytes(x: Floats | NDArray[np.float32]) -> Bytes:
    """From [0, 1] as published: clipped, multiplied by 255 and truncated, not rounded. Overwrites x."""
    np.clip(x, 0, 1, out=x)
    x *= 255
    return x.astype(np.uint8)


def relative_size(x_bhwc: Bytes) -> float:
    """How many pixels stand for one of a 32 × 32 picture."""
    return float(min(x_bhwc.shape[1:3])) / 32
