"""Priors on features, by their score s(x) = d log p(x) / dx. Paper section 3.3 and appendix B.2.

With the precision p = 1/σ² (the paper's "prior scale"):

    Cauchy    s(x) = −2 p x / (1 + p x²)      also the score of the half-Cauchy on x ≥ 0
    Normal    s(x) = −p x                     also that of the half-normal
    Uniform   s(x) = 0                        improper: no prior at all

A prior of your own is any object with such a `score`. It must treat every element on its own, because it is
evaluated on slices of the features.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Prior(Protocol):
    def score(self, x: Tensor) -> Tensor:
        """d log p(x) / dx, element by element."""
        ...


@dataclass(frozen=True)
class Cauchy:
    """The paper's default: heavy-tailed, so it hardly holds back large features. s(x) = −2 p x / (1 + p x²)."""

    precision: float = 1e-3

    def __post_init__(self) -> None:
        _check_precision(self)

    def score(self, x: Tensor) -> Tensor:
        return -2 * self.precision * x / (1 + self.precision * x.square())


@dataclass(frozen=True)
class Normal:
    """Weight decay on features. s(x) = −p x."""

    precision: float = 1e-3

    def __post_init__(self) -> None:
        _check_precision(self)

    def score(self, x: Tensor) -> Tensor:
        return -self.precision * x


@dataclass(frozen=True)
class Uniform:
    """No prior. s(x) = 0."""

    def score(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _check_precision(prior: Cauchy | Normal) -> None:
    if not isinstance(prior.precision, Real) or not 0 <= prior.precision < math.inf:
        raise ValueError(
            f"{type(prior).__name__} needs a finite precision 1/σ² of at least 0, like 1e-3; got {prior.precision!r}."
        )
