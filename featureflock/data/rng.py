"""Random numbers that are a function of what they are for, not of what was drawn before.

    h(a, b, …) = m(m(m(a) + b) + …) mod 2³²,      uniform = h / 2³²

with m a mixing of 32 bits in two rounds of shift, xor and multiplication. An epoch's augmentation is then the same
whichever process computes which part of it, on whichever device, after however many interruptions. The products stay
below 2⁶³, so that Python's integers and tensors of int64 give the same numbers.

Whole arrays of numbers for each of many pictures are counted: cell c of picture i has h(keys, i, m(c)). The counter is
mixed before it is added, so that no picture's numbers are a stretch of another's. Normal numbers are Φ⁻¹(uniform), one
for one.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = 0x21F0AAAD, 0x735A2D97


def random_bits(*keys: int | Tensor) -> int | Tensor:
    """32 random bits for the keys (at least 0, below 2³²): an int, or a tensor if some of the keys are."""
    bits: int | Tensor = 0
    for key in keys:
        bits = _mix((bits + key) & _MASK)
    return bits


def uniform(*keys: int) -> float:
    """A random number in [0, 1) for the keys."""
    return int(random_bits(*keys)) / 2**32


def below(bound: int, *keys: int | Tensor) -> Tensor:
    """Random integers from 0 to bound − 1 for the keys, some of which are tensors."""
    return torch.as_tensor(random_bits(*keys)) * bound >> 32


def permutation(size: int, *keys: int) -> Tensor:
    """A random order of 0 … size − 1 for the keys."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(random_bits(*keys))))


def cell_bits(shape: tuple[int, ...], index_b: NDArray[np.int64], *keys: int) -> NDArray[np.uint32]:
    """32 random bits for each cell of an array of this shape for each picture: (B, *shape).

    Cell c (counted in C order) of picture i has random_bits(*keys, i, random_bits(c)).
    """
    start_b = torch.as_tensor(random_bits(*keys, torch.from_numpy(index_b))).numpy().astype(np.uint32)
    cell_c = np.arange(math.prod(shape), dtype=np.uint32)
    _mix_in_place(cell_c)
    bits_bc = start_b[:, None] + cell_c
    _mix_in_place(bits_bc)
    return bits_bc.reshape(len(index_b), *shape)


def cell_uniforms(shape: tuple[int, ...], index_b: NDArray[np.int64], *keys: int) -> NDArray[np.float64]:
    """Random numbers between 0 and 1, neither included: (B, *shape)."""
    return (cell_bits(shape, index_b, *keys) + 0.5) / 2**32


def cell_normals(shape: tuple[int, ...], index_b: NDArray[np.int64], *keys: int) -> NDArray[np.float64]:
    """Random numbers with mean 0 and deviation 1, normally distributed: (B, *shape)."""
    normals: NDArray[np.float64] = ndtri(cell_uniforms(shape, index_b, *keys))
    return normals


def _mix(x: int | Tensor) -> int | Tensor:
    x = ((x ^ (x >> 16)) * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 15)) * _FACTORS[1]) & _MASK
    return x ^ (x >> 15)


def _mix_in_place(x: NDArray[np.uint32]) -> None:
    """The same for an array of 32 bits, where products lose what the mask takes away."""
    x ^= x >> 16
    x *= np.uint32(_FACTORS[0])
    x ^= x >> 15
    x *= np.uint32(_FACTORS[1])
    x ^= x >> 15
