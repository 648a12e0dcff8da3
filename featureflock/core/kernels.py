"""Radial kernels between particles, and the RBF's bandwidth.

    k_ij = exp(−‖z_i − z_j‖² / ℓ)

    median     ℓ   = median over pairs i<j of ‖z_i − z_j‖², over log n                       (the paper's text)
    official   ℓ_i = (median over j, i itself included, of ‖z_i − z_j‖²)² / log n + 1e-12    (the authors' code)

A user-defined kernel is any callable that maps the squared distances to k and its slope ∂k/∂‖z_i − z_j‖²; from these
∇_{z_i} k_ij = 2 slope_ij (z_i − z_j). The bandwidth is treated as a constant in that gradient. Register the kernel with
`@KERNELS.register("name")` to use it on the command line and to save ensembles that have it.

Shapes: n particles.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from featureflock.utils.registry import Registry


@runtime_checkable
class Kernel(Protocol):
    def __call__(self, sq_nn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernel matrix and its slope with respect to the squared distance, both (n, n)."""
        ...


KERNELS: Registry[type[Kernel]] = Registry("kernel")
"""Every kernel by its name on the command line."""


@KERNELS.register("rbf")
@dataclass(frozen=True)
class RBF:
    """k_ij = exp(−‖z_i − z_j‖² / ℓ), with ℓ from the median heuristic, as in the authors' code, or fixed."""

    bandwidth: Literal["median", "official"] | float = "median"
    """ℓ: median as in the paper, official as in the authors' code, or a fixed number."""

    def __post_init__(self) -> None:
        ell = self.bandwidth
        number = isinstance(ell, Real) and not isinstance(ell, bool) and 0 < ell < math.inf
        if not number and ell not in ("median", "official"):
            raise ValueError(
                f'RBF needs bandwidth="median", "official" or a positive finite number; got {self.bandwidth!r}.'
            )

    def __call__(self, sq_nn: Tensor) -> tuple[Tensor, Tensor]:
        width = self._width(sq_nn)
        # The limit ℓ → 0: k = 1 for coinciding particles and 0 for all others. Also used where 1/ℓ would overflow.
        positive = width > 1e-300
        safe = torch.where(positive, width, 1.0)
        k_nn = torch.where(positive, torch.exp(-sq_nn / safe), (sq_nn == 0).to(sq_nn.dtype))
        slope_nn = torch.where(positive, -k_nn / safe, 0.0)
        return k_nn, slope_nn

    def _width(self, sq_nn: Tensor) -> Tensor:
        """Return ℓ, broadcastable against the rows of the kernel matrix."""
        n = sq_nn.shape[0]
        if n == 1:
            return sq_nn.new_zeros(1, 1)
        if self.bandwidth == "median":
            i, j = torch.triu_indices(n, n, offset=1, device=sq_nn.device)
            return _median(sq_nn[i, j]) / math.log(n)
        if self.bandwidth == "official":
            return _median(sq_nn)[:, None].square() / math.log(n) + 1e-12
        return sq_nn.new_tensor(self.bandwidth)


def _median(x: Tensor) -> Tensor:
    """Return the median along the last axis: the mean of the two middle values if their number is even."""
    ordered, count = x.sort(dim=-1).values, x.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2
