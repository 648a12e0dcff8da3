"""Priors on features, by their score s(x) = d log p(x) / dx. Paper section 3.3 and appendix B.2.

With the precision p = 1/σ² (the paper's "prior scale"):

    Cauchy    s(x) = −2 p x / (1 + p x²)      also the score of the half-Cauchy on x ≥ 0
    Normal    s(x) = −p x                     also that of the half-normal
    Uniform   s(x) = 0                        improper: no prior at all

A user-defined prior is any object with such a `score`. The score must be elementwise, because it is evaluated on slices
of the features. Register it to use it on the command line and to save ensembles that have it:

    @PRIORS.register("laplace")
    @dataclass(frozen=True)
    class Laplace:
        precision: float = 1.0

        def score(self, x: Tensor) -> Tensor:
            return -self.precision**0.5 * x.sign()
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from featureflock.utils.registry import Registry


@runtime_checkable
class Prior(Protocol):
    def score(self, x: Tensor) -> Tensor:
        """Return d log p(x) / dx, elementwise."""
        ...


PRIORS: Registry[type[Prior]] = Registry("prior")
"""Every prior by its name on the command line."""


@PRIORS.register("cauchy")
@dataclass(frozen=True)
class Cauchy:
    """The paper's default: heavy-tailed, so it hardly penalises large features. s(x) = −2 p x / (1 + p x²)."""

    precision: float = 1e-3  # Precision p = 1/σ²; 0 for no prior.

    def __post_init__(self) -> None:
        _check_precision(self)

    def score(self, x: Tensor) -> Tensor:
        return -2 * self.precision * x / (1 + self.precision * x.square())


@PRIORS.register("normal")
@dataclass(frozen=True)
class Normal:
    """Weight decay on features. s(x) = −p x."""

    precision: float = 1e-3  # Precision p = 1/σ²; 0 for no prior.

    def __post_init__(self) -> None:
        _check_precision(self)

    def score(self, x: Tensor) -> Tensor:
        return -self.precision * x


@PRIORS.register("uniform")
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
