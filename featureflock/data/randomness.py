"""Random numbers that are a function of what they are for, not of what was drawn before.

    h(a, b, …) = m(m(m(a) + b) + …) mod 2³²,      uniform = h / 2³²

with m a mixing of 32 bits in two rounds of shift, xor and multiplication. An epoch's augmentation is then the same
whichever process computes which part of it, on whichever device, after however many interruptions. The products stay
below 2⁶³, so that Python's integers and tensors of int64 give the same numbers.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


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


def _mix(x: int | Tensor) -> int | Tensor:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
