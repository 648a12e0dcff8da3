"""Update rules: how particles use the kernel. With S = data gradient + prior score, K the kernel matrix and
(∇K)_i = Σ_j ∇_{z_i} k_ij:

    WGD        v_i = S_i − (∇K)_i / Σ_j k_ij                      kernel density estimate: the paper's
    SteinWGD   v   = S − (K + η I)⁻¹ ∇K                           Stein gradient estimator
    SVGD       v_i = (1/n) Σ_j [ k_ij S_j + ∇_{z_j} k_ij ]        Stein variational gradient descent
    MAP        v   = S                                            no interaction: each particle finds its own mode

All four have the form v = A S − Q ∇K with two n × n matrices, so a rule maps K to A and Q. Register a user-defined rule
with `@RULES.register("name")` to use it on the command line and to save ensembles that have it.

`transport` multiplies Q ∇K by the repulsion τ, the temperature of the posterior p^(1/τ) that the particles approximate.

Langevin noise of strength T > 0 adds √(2T/α) F ξ to v, with white noise ξ, so that a step of size α along v is a
Langevin step. F is the identity; for SVGD it is the Cholesky factor of K, which gives the noise the covariance K across
particles. Noise is another way to the same temperature: in the flow of the density, diffusion of strength T acts as
−T ∇ log q. Both together approximate p^(1/(τ + T)); Langevin sampling of the posterior itself has τ = 0 and T = 1.

Shapes: n particles.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.utils.registry import Registry


class Weights(NamedTuple):
    """The n × n matrices of a rule; None stands for the identity."""

    drive: Tensor | None
    """A of v = A S − Q ∇K."""
    density: Tensor
    """Q of v = A S − Q ∇K."""
    noise: Tensor | None = None
    """F of the Langevin noise √(2T/α) F ξ."""


@dataclass(frozen=True)
class Rule(ABC):
    """Base class of update rules. A user-defined rule is a frozen dataclass that inherits from it."""

    noise: float = 0.0
    """T, the strength of the Langevin noise √(2T/α) F ξ; 0 for none. It acts in addition to the repulsion."""
    step_size: float = 1.0
    """α of the Langevin noise: the step size that multiplies v. For a ParticleLayer, whose gradient is v/B, it is the
    learning rate divided by B, or by `count` if that is set."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.noise, Real) or not 0 <= self.noise < math.inf:
            raise ValueError(f"{name} needs a finite noise of at least 0; got {self.noise!r}.")
        if not isinstance(self.step_size, Real) or not 0 < self.step_size < math.inf:
            raise ValueError(f"{name} needs a positive finite step_size; got {self.step_size!r}.")

    @abstractmethod
    def weights(self, k_nn: Tensor) -> Weights:
        """Return A, Q and F for the kernel matrix."""


RULES: Registry[type[Rule]] = Registry("update rule")
"""Every update rule by its name on the command line."""


@RULES.register("wgd")
@dataclass(frozen=True)
class WGD(Rule):
    """Wasserstein gradient descent with a kernel density estimate: A = I, Q = diag(1 / Σ_j k_ij)."""

    def weights(self, k_nn: Tensor) -> Weights:
        return Weights(drive=None, density=torch.diag(1 / k_nn.sum(1)))


@RULES.register("stein-wgd")
@dataclass(frozen=True)
class SteinWGD(Rule):
    """Wasserstein gradient descent with the Stein gradient estimator: A = I, Q = (K + η I)⁻¹."""

    eta: float = 0.01
    """η, the ridge of the estimator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.eta, Real) or not 0 < self.eta < math.inf:
            raise ValueError(f"SteinWGD needs a positive finite ridge eta, such as 0.01; got {self.eta!r}.")

    def weights(self, k_nn: Tensor) -> Weights:
        return Weights(drive=None, density=torch.linalg.inv(k_nn + self.eta * _eye(k_nn)))


@RULES.register("svgd")
@dataclass(frozen=True)
class SVGD(Rule):
    """Stein variational gradient descent: A = K/n and Q = I/n, since ∇_{z_j} k_ij = −∇_{z_i} k_ij."""

    def weights(self, k_nn: Tensor) -> Weights:
        n, eye = k_nn.shape[0], _eye(k_nn)
        # The jitter keeps the factor defined where members coincide and K is singular.
        noise = torch.linalg.cholesky(k_nn + 1e-10 * eye) if self.noise > 0 else None
        return Weights(drive=k_nn / n, density=eye / n, noise=noise)


@RULES.register("map")
@dataclass(frozen=True)
class MAP(Rule):
    """No interaction: A = I and Q = 0. The other rules reduce to it for one particle; for many it is their ablation."""

    def weights(self, k_nn: Tensor) -> Weights:
        return Weights(drive=None, density=torch.zeros_like(k_nn))


def _eye(k_nn: Tensor) -> Tensor:
    return torch.eye(k_nn.shape[0], dtype=k_nn.dtype, device=k_nn.device)
