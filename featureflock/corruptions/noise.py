"""Noise: Gaussian, shot, impulse.

    gaussian_noise   x + N(0, c)                                  for each value of each channel
    shot_noise       Poisson(x c) / c
    impulse_noise    0 with probability c/2, 1 with probability c/2, else x

Poisson numbers are sampled by inversion: the smallest k whose cumulative probability F_λ(k) exceeds a uniform number u.
Bytes have 256 levels, so F has 256 rows. Concatenated as (level + F) they form one sorted list, which is searched for
(level + u). The resulting byte grows with u, so for most of 4,096 intervals of u it is precomputed, and only the
remaining ones are searched.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtr

from featureflock.corruptions.images import Bytes, Floats, ImageRandom, to_bytes

GAUSSIAN = (0.04, 0.06, 0.08, 0.09, 0.10)
SHOT = (500, 250, 100, 75, 50)
IMPULSE = (0.01, 0.02, 0.03, 0.05, 0.07)

_INTERVALS, _AMBIGUOUS = 4096, 256  # precomputed intervals of u, and the mark of those with more than one byte


def gaussian_noise(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    noise = rng.normal(0, GAUSSIAN[severity - 1], *x_bhwc.shape[1:])
    noise += x_bhwc / 255
    return to_bytes(noise)


def shot_noise(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    c = SHOT[severity - 1]
    u = rng.uniform(0, 1, *x_bhwc.shape[1:])
    y = _poisson_guide(c)[x_bhwc, (u * _INTERVALS).astype(np.intp)]
    ambiguous = np.nonzero(y == _AMBIGUOUS)
    y[ambiguous] = _poisson_bytes(x_bhwc[ambiguous], u[ambiguous], c)
    return y.astype(np.uint8)


def impulse_noise(x_bhwc: Bytes, severity: int, rng: ImageRandom) -> Bytes:
    c = IMPULSE[severity - 1]
    u = rng.uniform(0, 1, *x_bhwc.shape[1:])
    y = to_bytes(np.arange(256) / 255)[x_bhwc]  # as published, truncation decreases some bytes by one
    y[u < c] = 255
    y[u < c / 2] = 0
    return y


def _poisson_bytes(level: Bytes, u: Floats, c: int) -> Bytes:
    """Poisson(level / 255 · c) / c as bytes, by inversion."""
    ends, first = _poisson_table(c)
    return to_bytes((np.searchsorted(ends, level + u, side="right") - first[level]) / c)


@cache
def _poisson_guide(c: int) -> NDArray[np.uint16]:
    """The byte for each level and interval of u, (256, intervals), if it is the same at both ends."""
    level = np.repeat(np.arange(256, dtype=np.uint8), _INTERVALS).reshape(256, -1)
    start = np.broadcast_to(np.arange(_INTERVALS) / _INTERVALS, level.shape)
    end = np.minimum(start + 1 / _INTERVALS, 1 - 2**-33)
    low, high = (_poisson_bytes(level, u, c) for u in (start, end))
    return np.where(low == high, low, np.uint16(_AMBIGUOUS)).astype(np.uint16)


@cache
def _poisson_table(c: int) -> tuple[Floats, NDArray[np.int64]]:
    """(level + F) for all levels, concatenated, and the position where each level begins."""
    rows = []
    for level in range(256):
        rate = level / 255 * c
        count = np.arange(int(rate + 8 * math.sqrt(rate)) + 16)  # larger counts have a probability below 2⁻³²
        rows.append(level + np.append(pdtr(count, rate), 1.0))
    lengths = np.array([len(row) for row in rows])
    return np.concatenate(rows), np.cumsum(lengths) - lengths
