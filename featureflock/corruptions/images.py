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


def plasma(rng: ImageRandom, size: int, decay: float) -> Floats:
    """Return plasma fractals (B, n, n) in [0, 1] by the diamond-square algorithm on a torus, n ≥ size a power of two.

        step = n, n/2, …, 2:   the centre of each square of side `step`, then the middle of each of its edges, becomes
                               the mean of its four neighbours at distance step/2 plus w · U(−w, w);   w ← w / decay

    with w = 100 initially, so the noise shrinks by decay² per level. Finally the map is rescaled to [0, 1].
    """
    n = 1 << (size - 1).bit_length()
    map_bnn: Floats = np.zeros((len(rng.index_b), n, n))
    step, wibble, level = n, 100.0, 0
    while step >= 2:
        half, k = step // 2, n // step
        noise = wibble * rng.uniform(-wibble, wibble, 3, k, k, stream=level)
        corner = map_bnn[:, ::step, ::step]
        pair = corner + np.roll(corner, -1, axis=1)
        centre = (pair + np.roll(pair, -1, axis=2)) / 4 + noise[:, 0]
        map_bnn[:, half::step, half::step] = centre
        across = centre + np.roll(centre, 1, axis=1) + corner + np.roll(corner, -1, axis=2)
        map_bnn[:, ::step, half::step] = across / 4 + noise[:, 1]
        down = centre + np.roll(centre, 1, axis=2) + corner + np.roll(corner, -1, axis=1)
        map_bnn[:, half::step, ::step] = down / 4 + noise[:, 2]
        step, wibble, level = half, wibble / decay, level + 1
    map_bnn -= map_bnn.min(axis=(1, 2), keepdims=True)
    map_bnn /= map_bnn.max(axis=(1, 2), keepdims=True)
    return map_bnn
