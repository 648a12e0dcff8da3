"""Noise: Gaussian, shot, impulse.

    gaussian_noise   x + N(0, c)                                  for each value of each channel
    shot_noise       Poisson(x c) / c
    impulse_noise    0 with probability c/2, 1 with probability c/2, else x

Poisson numbers are drawn by inversion: the least k whose cumulative probability F_λ(k) exceeds a uniform number u. As
bytes have 256 levels, F has 256 rows; laid end to end as (level + F) they are one sorted list, in which (level + u) is
looked up. As the byte that results grows with u, it is known beforehand for most of 4,096 intervals of u, and only the
others are searched for.
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

_INTERVALS, _UNSURE = 4096, 256


def gaussian_noise(x_bhwc: Bytes, severity: int, chance: ImageRandom) -> Bytes:
    noise = chance.normal(0, GAUSSIAN[severity - 1], *x_bhwc.shape[1:])
    noise += x_bhwc / 255
    return to_bytes(noise)


def shot_noise(x_bhwc: Bytes, severity: int, chance: ImageRandom) -> Bytes:
    c = SHOT[severity - 1]
    u = chance.uniform(0, 1, *x_bhwc.shape[1:])
    y = _poisson_guide(c)[x_bhwc, (u * _INTERVALS).astype(np.intp)]
    unsure = np.nonzero(y == _UNSURE)
    y[unsure] = _poisson_bytes(x_bhwc[unsure], u[unsure], c)
    return y.astype(np.uint8)


def impulse_noise(x_bhwc: Bytes, severity: int, chance: ImageRandom) -> Bytes:
    c = IMPULSE[severity - 1]
    u = chance.uniform(0, 1, *x_bhwc.shape[1:])
    kept = to_bytes(np.arange(256) / 255)[x_bhwc]  # as published, some bytes lose one on their way to [0, 1] and back
    kept[u < c] = 255
    kept[u < c / 2] = 0
    return kept


def _poisson_bytes(level: Bytes, u: Floats, c: int) -> Bytes:
    """Poisson(level / 255 · c) / c as bytes, by inversion."""
    ends, first = _poisson_table(c)
    return to_bytes((np.searchsorted(ends, level + u, side="right") - first[level]) / c)


@cache
def _poisson_guide(c: int) -> NDArray[np.uint16]:
    """The byte for each level and interval of u, (256, intervals), where it is the same at both ends."""
    level = np.repeat(np.arange(256, dtype=np.uint8), _INTERVALS).reshape(256, -1)
    start = np.broadcast_to(np.arange(_INTERVALS) / _INTERVALS, level.shape)
    end = np.minimum(start + 1 / _INTERVALS, 1 - 2**-33)
    low, high = (_poisson_bytes(level, u, c) for u in (start, end))
    return np.where(low == high, low, np.uint16(_UNSURE)).astype(np.uint16)


@cache
def _poisson_table(c: int) -> tuple[Floats, NDArray[np.int64]]:
    """(level + F) for all levels, end to end, and where each level begins."""
    rows = []
    for level in range(256):
        rate = level / 255 * c
        count = np.arange(int(rate + 8 * math.sqrt(rate)) + 16)  # beyond, there is less than one in 2³²
        rows.append(level + np.append(pdtr(count, rate), 1.0))
    lengths = np.array([len(row) for row in rows])
    return np.concatenate(rows), np.cumsum(lengths) - lengths
