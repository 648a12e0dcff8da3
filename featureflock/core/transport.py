"""Algorithm 1 of the paper on tensors (n, d). `ParticleLayer` (layer.py) applies it in the backward pass.

    g_i   = ∇_{h_i} log p(data | h_i)                                  data gradient
    s_i   = ∇_{h_i} log p(h_i)                                         prior score
    Ψ_r   = the r dominant left singular vectors of [g_1 … g_n]        no projection: the identity
    z_i   = Ψ_rᵀ h_i
    v_i   = g_i + s_i − τ Ψ_r Σ_j ∇_{z_i} k(z_i, z_j) / Σ_j k(z_i, z_j)    eq. (9) has τ = 1; other rules in rules.py

The last term is −τ ∇ log q(h_i), with q a kernel density estimate of the particles. τ, the `repulsion`, is the
temperature of the posterior: the flow is stationary where ∇ log q = (1/τ) ∇ log p, that is q ∝ p^(1/τ). τ = 1 samples
the posterior, τ > 1 spreads the particles further, τ = 0 is MAP. On a Gaussian, particles settle √τ times as far apart.

No intermediate is larger than the particles. With G the n × d matrix of gradients, the eigenvectors U and eigenvalues Λ
of the n × n matrix G Gᵀ give Ψ_r = Gᵀ M with M = U_r Λ_r^{−1/2}, so z = (H Gᵀ) M needs one more n × n matrix. The sum
over j is linear in z: Σ_j ∇_{z_i} k_ij = (L z)_i with L = diag(W 1) − W and W_ij = 2 ∂k_ij/∂‖z_i − z_j‖². Hence, with
A and Q of the rule and one n × n matrix C:

    v = A (G + s(H)) − C X        C = τ Q L z Mᵀ, X = G        or without projection C = τ Q L, X = H − h_0

Here h_0 is any point, since only differences of particles matter. The code makes two passes over d, slice by slice, and
does the n × n algebra in float64 for particles of any dtype. If d is divided among processes, only the two n × n
matrices are summed over them.

Shapes: n particles of dimension d, projection of rank r.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.priors import Prior
from featureflock.core.rules import MAP, SVGD, WGD, Rule
from featureflock.core.value_checks import readable, refuse_later

Subspace = Literal["dominant", "weakest"]

_SLICE_SIZE = 2**16
"""Largest number of values in a float64 slice of the particles on a CPU, whose cache holds a few such slices."""
_GPU_SLICE_SIZE = 2**24
"""The same on other devices, where each slice costs dozens of small kernels: 128 MB. Not measured on a GPU."""


class NonFiniteError(ValueError):
    """Some members have NaN or infinite values."""

    def __init__(self, members: list[int], message: str) -> None:
        super().__init__(message)
        self.members = members


@torch.no_grad()
def transport(
    particles: Tensor,
    loglik_grad: Tensor,
    *,
    prior: Prior,
    kernel: Kernel = RBF(),
    rank: int | None = None,
    subspace: Subspace = "dominant",
    rule: Rule = WGD(),
    repulsion: float = 1.0,
) -> Tensor:
    """Return the ascent direction v (n, d) of Algorithm 1: data gradient + prior score − repulsion.

        v_i = g_i + s_i − τ Ψ_r Σ_j ∇_{z_i} k(z_i, z_j) / Σ_j k(z_i, z_j),    z_i = Ψ_rᵀ h_i

    Args:
        particles: h, (n, d), of any floating dtype.
        loglik_grad: g = ∇_h log p(data | h), (n, d).
        prior: Cauchy, Normal, Uniform, or any object with an elementwise `score`.
        kernel: RBF, or any radial kernel (kernels.py).
        rank: r, the number of directions in which particles repel, at most n; None for no projection.
        subspace: the r dominant directions of the gradients, as in the paper, or the r weakest, as in its code.
        rule: WGD, SVGD, SteinWGD or MAP.
        repulsion: τ, the temperature of the posterior p^(1/τ) that the particles approximate. 1 is the paper's
            value; larger values push the particles further apart, 0 gives MAP.

    Where the formula divides by zero, its limit is used: no repulsion for one particle, for coinciding particles, or if
    all gradients are zero; directions without any gradient are left out.

    Non-finite particles or gradients raise `NonFiniteError` on a CPU. On a GPU, where the check would force a
    synchronisation, v is NaN, and a later call raises ValueError.
    """
    config = TransportConfig(prior, kernel, rank, subspace, rule, repulsion)
    _check_arrays(particles, loglik_grad)
    config.check(particles.shape[0])
    v, finite = ascent_direction(particles, loglik_grad, config)
    if not readable(finite):
        refuse_later(~finite, "The particles or gradients of transport contain NaN or infinity.")
        return v.masked_fill_(~finite, math.nan)
    if not finite:
        check_finite(particles, "particles")
        check_finite(loglik_grad, "loglik_grad")
        raise ValueError("The squares of the particles or gradients overflow float64; scale them down.")
    return v


@dataclass(frozen=True)
class TransportConfig:
    """The arguments that `transport` and `ParticleLayer` share."""

    prior: Prior
    kernel: Kernel
    rank: int | None
    subspace: Subspace
    rule: Rule
    repulsion: float = 1.0

    def check(self, n: int | None = None) -> None:
        """Raise ValueError for arguments that cannot be right, also for n particles if n is given."""
        integer = isinstance(self.rank, Integral) and not isinstance(self.rank, bool)
        if self.rank is not None and not (integer and self.rank >= 1):
            raise ValueError(f"rank must be an integer of at least 1, or None for no projection; got {self.rank!r}.")
        if n is not None and self.rank is not None and self.rank > n:
            raise ValueError(
                f"rank={self.rank} exceeds the {n} member{'s' * (n > 1)}, whose gradients span at most {n} direction"
                f"{'s' * (n > 1)}; use rank ≤ {n}, or None for no projection."
            )
        if not callable(getattr(self.prior, "score", None)):
            raise ValueError(f"prior must have a method score(x), as Cauchy(1e-3) has; got {self.prior!r}.")
        if not callable(self.kernel):
            raise ValueError(
                f"kernel must map squared distances to values and slopes, as RBF() does; got {self.kernel!r}."
            )
        if not callable(getattr(self.rule, "weights", None)):
            raise ValueError(f"rule must be an update rule such as WGD(); got {self.rule!r}.")
        if self.subspace not in ("dominant", "weakest"):
            raise ValueError(f'subspace must be "dominant" or "weakest"; got {self.subspace!r}.')
        if not isinstance(self.repulsion, Real) or not 0 <= self.repulsion < math.inf:
            raise ValueError(f"repulsion must be a finite number of at least 0; got {self.repulsion!r}.")
        if isinstance(self.rule, SVGD) and self.rule.noise > 0 and self.kernel == RBF("official"):
            raise ValueError(
                "The covariance of SVGD's Langevin noise is the kernel matrix, which bandwidth='official' makes "
                "asymmetric; use bandwidth='median', a number, or noise=0."
            )


class _Interaction(NamedTuple):
    """The matrices of v = A (G + s(H)) − C X, and F of the Langevin noise; None stands for the identity."""

    a_nn: Tensor | None
    c_nn: Tensor
    f_nn: Tensor | None


def ascent_direction(
    h_nd: Tensor,
    g_nd: Tensor,
    config: TransportConfig,
    *,
    grad_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
    batch_ratio: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `v_factor` · v for the data gradient `grad_factor` · g, and whether all input was finite.

    The repulsion is multiplied by the sum of `batch_ratio` over the processes of the group, if it is given.
    """
    if h_nd.device.type == "mps":  # has no float64
        v, finite = ascent_direction(
            h_nd.cpu(),
            g_nd.cpu(),
            config,
            grad_factor=grad_factor,
            v_factor=v_factor,
            batch_ratio=batch_ratio,
            group=group,
        )
        return v.to(h_nd.device), finite.to(h_nd.device)
    projected, no_interaction = config.rank is not None, h_nd.shape[0] == 1 or isinstance(config.rule, MAP)
    xx_nn, hx_nn, finite, ratio = _grams(h_nd, g_nd, grad_factor, projected, no_interaction, batch_ratio, group)
    repulsion = config.repulsion if batch_ratio is None else config.repulsion * ratio
    interaction = None if no_interaction else _interaction(xx_nn, hx_nn, config, repulsion)
    v_nd = torch.empty_like(h_nd, memory_format=torch.contiguous_format)
    for part, h, g in _slices(h_nd, g_nd, grad_factor):
        s = g + config.prior.score(h)
        if interaction is not None:
            s = s if interaction.a_nn is None else interaction.a_nn @ s
            s = torch.addmm(s, interaction.c_nn, g if projected else _centred(h), alpha=-1)
        if config.rule.noise > 0:
            noise = torch.randn_like(h)
            noise = noise if interaction is None or interaction.f_nn is None else interaction.f_nn @ noise
            s = s + math.sqrt(2 * config.rule.noise / config.rule.step_size) * noise
        v_nd[:, part] = (s * v_factor).to(v_nd.dtype)
    return v_nd, finite


def _grams(
    h_nd: Tensor,
    g_nd: Tensor,
    grad_factor: float | Tensor,
    projected: bool,
    no_interaction: bool,
    batch_ratio: float | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return X Xᵀ, (H − h_0) Xᵀ, whether all values are finite, and the batch ratio, of the whole group.

    X = G, or H − h_0 without projection.
    """
    n = h_nd.shape[0]
    xx_nn = torch.zeros(n, n, dtype=torch.float64, device=h_nd.device)
    hx_nn, total = xx_nn.clone(), xx_nn.new_zeros(())
    for _, h, g in _slices(h_nd, g_nd, grad_factor):
        total = total + h.sum() + g.sum()
        if not no_interaction:
            h = _centred(h)
            x = g if projected else h
            xx_nn = torch.addmm(xx_nn, x, x.T)
            hx_nn = torch.addmm(hx_nn, h, x.T) if projected else xx_nn
    ratio = total.new_full((), batch_ratio or 0.0)
    if group is not None:
        sums = torch.cat([xx_nn.flatten(), hx_nn.flatten(), total.view(1), ratio.view(1)])
        dist.all_reduce(sums, group=group)
        xx_nn, hx_nn, total, ratio = sums[: n * n].view(n, n), sums[n * n : -2].view(n, n), sums[-2], sums[-1]
    finite = torch.isfinite(total) & torch.isfinite(xx_nn).all() & torch.isfinite(hx_nn).all()
    # eigh fails on non-finite input; the flag informs the caller.
    return torch.where(finite, xx_nn, 0.0), torch.where(finite, hx_nn, 0.0), finite, ratio


def _centred(h: Tensor) -> Tensor:
    """Return H − h_0, with h_0 the elementwise median of three members.

    This removes the large common part of positive features, even if one of the three is an outlier, and is exactly zero
    for identical members. A mean has neither property.
    """
    n = h.shape[0]
    a, b, c = h[0], h[n // 2], h[n - 1]
    return h - torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


def _interaction(xx_nn: Tensor, hx_nn: Tensor, config: TransportConfig, repulsion: float | Tensor) -> _Interaction:
    """Return A, C and F, given X Xᵀ, (H − h_0) Xᵀ and the repulsion."""
    if config.rank is None:
        norms_n = xx_nn.diagonal()
        sq_nn = norms_n[:, None] + norms_n[None] - 2 * xx_nn
        z_nr = m_nn = None
    else:
        m_nn = _basis(xx_nn, config.rank, config.subspace)
        z_nr = hx_nn @ m_nn
        norms_n = z_nr.square().sum(1)
        sq_nn = torch.cdist(z_nr, z_nr, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Smaller distances are rounding errors of coinciding particles.
    sq_nn = torch.where(sq_nn > 1e-13 * (norms_n[:, None] + norms_n[None]), sq_nn, 0.0)
    k_nn, slope_nn = config.kernel(sq_nn)
    w_nn = torch.where(sq_nn > 0, 2 * slope_nn, 0.0)
    a_nn, q_nn, f_nn = config.rule.weights(k_nn)
    c_nn = (repulsion * q_nn) @ (torch.diag(w_nn.sum(1)) - w_nn)
    if m_nn is not None and z_nr is not None:
        c_nn = c_nn @ z_nr @ m_nn.T
    return _Interaction(a_nn, c_nn, f_nn)


def _basis(gg_nn: Tensor, rank: int, subspace: Subspace) -> Tensor:
    """Return M with Ψ_r = Gᵀ M: chosen eigenvectors of G Gᵀ over their singular values, and zero columns."""
    n = gg_nn.shape[0]
    eigenvalues, u_nn = torch.linalg.eigh(gg_nn)  # ascending
    tolerance = 10 * n * torch.finfo(gg_nn.dtype).eps * eigenvalues[-1]
    nonzero = eigenvalues > tolerance.clamp_min(0)
    position = nonzero.cumsum(0) if subspace == "weakest" else nonzero.flip(0).cumsum(0).flip(0)
    chosen = nonzero & (position <= rank)
    inverse_n = torch.where(chosen, eigenvalues.clamp_min(torch.finfo(gg_nn.dtype).tiny).rsqrt(), 0.0)
    m_nn: Tensor = u_nn * inverse_n
    return m_nn


def _slices(h_nd: Tensor, g_nd: Tensor, grad_factor: float | Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Iterate over slices of the columns of H and grad_factor · G in float64.

    On a CPU a slice is an eighth of them, at most 2¹⁶ values; on other devices at most 2²⁴ values.
    """
    n, d = h_nd.shape
    on_cpu = h_nd.device.type == "cpu"
    size = min(max(n * d // 8, _SLICE_SIZE // 32), _SLICE_SIZE) if on_cpu else _GPU_SLICE_SIZE
    width = max(1, size // n)
    for start in range(0, d, width):
        part = slice(start, min(start + width, d))
        yield part, h_nd[:, part].double(), g_nd[:, part].double() * grad_factor


def _check_arrays(h: Tensor, g: Tensor) -> None:
    if not (isinstance(h, Tensor) and isinstance(g, Tensor)):
        raise ValueError(f"transport takes two tensors; got {type(h).__name__} and {type(g).__name__}.")
    if h.ndim != 2 or h.numel() == 0:
        shape = tuple(h.shape)
        raise ValueError(f"transport needs particles (n, d) with at least one particle and one dimension; got {shape}.")
    if g.shape != h.shape:
        shapes = f"particles have shape {tuple(h.shape)}, loglik_grad has {tuple(g.shape)}"
        raise ValueError(f"transport needs one gradient for each particle: {shapes}.")
    if not (h.is_floating_point() and g.is_floating_point()):
        raise ValueError(f"transport needs real floating-point tensors; got {h.dtype} and {g.dtype}.")
    if h.device != g.device:
        raise ValueError(f"particles are on {h.device} and loglik_grad is on {g.device}; move one to the other.")


def check_finite(x: Tensor, name: str) -> None:
    """Raise NonFiniteError if any member of x (n, …) has NaN or infinite values."""
    check_members(torch.isfinite(x), name)


def check_members(finite: Tensor, name: str) -> None:
    """Raise NonFiniteError if `finite` (n, …) is not true everywhere."""
    if not finite.all():
        members = [i for i, member in enumerate(finite) if not member.all()]
        raise NonFiniteError(
            members,
            f"The {name} of member{'s' * (len(members) > 1)} {', '.join(map(str, members))} contain NaN or infinity; "
            "check for a learning rate that is too high or for bad data.",
        )
