"""Counter-based random numbers: each number is a function of its keys, not of what was drawn before.

    h(a, b, …) = m(m(m(a) + b) + …) mod 2³²,      uniform = h / 2³²

where m mixes 32 bits in two rounds of shift, xor and multiplication. The augmentation of an epoch is therefore the same
whichever process computes it, on whichever device, after any number of interruptions. The products stay below 2⁶³, so
Python integers and int64 tensors give the same numbers.

Arrays of random numbers for many images use h(keys, i, m(c)) for cell c of image i. The counter c is mixed before it is
added, so the numbers of one image are never a shifted copy of another's.
"""

import math
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = 0x21F0AAAD, 0x735A2D97


class Stream(IntEnum):
    """The purpose of a random number, as one of its keys.

    Members with equal values are aliases of each other. They never give the same numbers to the same data: their keys
    differ in number or position, or they act on different data.
    """

    # Augmentation in memory, keys (seed, epoch, index, stream)
    CROP_TOP = 0
    CROP_LEFT = 1
    FLIP = 2
    # Augmentation of image files, keys (seed, epoch, index, stream)
    FILE_FLIP = 0
    FILE_CROP = 1
    # Splits of a data set, keys (seed, stream)
    VALIDATION = 1
    SUBSET = 2
    TEST_SUBSET = 3
    # Training, keys (seed, stream, epoch or step)
    EPOCH_ORDER = 1
    TRAINING_STEP = 2
    # The discriminator of conditional redundancy, keys (seed, stream, step)
    REDUNDANCY_FIT = 1
    REDUNDANCY_ESTIMATE = 2
    # Data that do not depend on a seed, keys (stream, …)
    DIGITS_SPLIT = 0
    DATA_DEPENDENT_INIT = 3
    TABULAR_SPLIT = 4
    OOD_NOISE = 0x401
    DOMINO_PAIRS = 0x501
    FROST_TEXTURE = 0xF205


def random_bits(*keys: int | Tensor) -> int | Tensor:
    """32 random bits for keys in [0, 2³²): an int, or a tensor if any key is a tensor."""
    bits: int | Tensor = 0
    for key in keys:
        bits = _mix((bits + key) & _MASK)
    return bits


def uniform(*keys: int) -> float:
    """A random number in [0, 1)."""
    return int(random_bits(*keys)) / 2**32


def below(bound: int, *keys: int | Tensor) -> Tensor:
    """Random integers in [0, bound), one for each element of the tensors among the keys."""
    return torch.as_tensor(random_bits(*keys)) * bound >> 32


def permutation(size: int, *keys: int) -> Tensor:
    """A random permutation of 0 … size − 1."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(random_bits(*keys))))


def cell_bits(shape: tuple[int, ...], index_b: NDArray[np.int64], *keys: int) -> NDArray[np.uint32]:
    """32 random bits for each cell of one array per image: (B, *shape).

    Cell c (in C order) of image i has random_bits(*keys, i, random_bits(c)).
    """
    start_b = torch.as_tensor(random_bits(*keys, torch.from_numpy(index_b))).numpy().astype(np.uint32)
    bits_bc: NDArray[np.uint32] = _mix(start_b[:, None] + _mix(np.arange(math.prod(shape), dtype=np.uint32)))
    return bits_bc.reshape(len(index_b), *shape)


def cell_uniforms(shape: tuple[int, ...], index_b: NDArray[np.int64], *keys: int) -> NDArray[np.float64]:
    """Random numbers in the open interval (0, 1): (B, *shape)."""
    return (cell_bits(shape, index_b, *keys) + 0.5) / 2**32


def _mix(x: Any) -> Any:
    """Mix ints, int64 tensors or uint32 arrays. Products of uint32 wrap around, to what the mask would give."""
    x = ((x ^ (x >> 16)) * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 15)) * _FACTORS[1]) & _MASK
    return x ^ (x >> 15)
