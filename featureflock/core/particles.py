"""Algorithm 1 of the paper on arrays (`transport`), and the same as a layer (`ParticleLayer`).

    g_i   = ∇_{h_i} log p(data | h_i)                                  data gradient
    s_i   = ∇_{h_i} log p(h_i)                                         prior score
    Ψ_r   = the r dominant left singular vectors of [g_1 … g_n]        no projection: the identity
    z_i   = Ψ_rᵀ h_i
    v_i   = g_i + s_i − Ψ_r Σ_j ∇_{z_i} k(z_i, z_j) / Σ_j k(z_i, z_j)  eq. (9); other rules in rules.py

Nothing here is larger than the particles. With G the n × d matrix of gradients, the eigenvectors U, Λ of the n × n
matrix G Gᵀ give Ψ_r = Gᵀ M with M = U_r Λ_r^{−1/2}, so z = (H Gᵀ) M needs one more n × n matrix. The sum over j is
linear in z, Σ_j ∇_{z_i} k_ij = (L z)_i with L = diag(W 1) − W and W_ij = 2 ∂k_ij/∂‖z_i − z_j‖². Hence with the rule's
A and Q, for one n × n matrix C:

    v = A (G + s(H)) − C X        C = Q L z Mᵀ, X = G          or without projection C = Q L, X = H − h_0

Here h_0 is any point, since only differences of particles matter. Two passes over d, in slices; the n × n algebra in
float64 whatever the dtype of the particles. Where processes have a part of d each, only the two n × n matrices are
summed over them.

Shapes: n particles, d numbers in each, r rank of the projection, B data points.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import MAP, SVGD, WGD, Rule

Subspace = Literal["dominant", "weakest"]


class NonFiniteError(ValueError):
    """Some members' numbers are NaN or infinite."""

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
) -> Tensor:
    """The ascent direction v (n, d) of Algorithm 1: data gradient + prior score − repulsion.

        v_i = g_i + s_i − Ψ_r Σ_j ∇_{z_i} k(z_i, z_j) / Σ_j k(z_i, z_j),    z_i = Ψ_rᵀ h_i

    Args:
        particles: h, (n, d), of any floating dtype.
        loglik_grad: g = ∇_h log p(data | h), (n, d).
        prior: Cauchy, Normal, Uniform, or any object with an elementwise `score`.
        kernel: RBF, or any radial kernel (kernels.py).
        rank: r, the number of directions in which particles repel, at most n; None for no projection.
        subspace: the r dominant directions of the gradients, as the paper says, or the r weakest, as its code does.
        rule: WGD, SVGD, SteinWGD or MAP.

    Where the formula divides by zero it takes its limit: no repulsion for one particle, for particles at one place, or
    where all gradients are zero; directions in which no gradient points are left out.
    """
    law = _Law(prior, kernel, rank, subspace, rule)
    _check_arrays(particles, loglik_grad)
    law.check(particles.shape[0])
    v, finite = _ascent(particles, loglik_grad, law)
    if not finite:
        _refuse_non_finite(particles, "particles")
        _refuse_non_finite(loglik_grad, "loglik_grad")
        raise ValueError("The squares of the particles or gradients overflow float64; scale them down.")
    return v


class ParticleLayer(nn.Module):
    """The whole method as one layer: the identity forward, the direction of Algorithm 1 backward.

    Input and output are (n, B, …): n members' features of the same B data points. Train with the ordinary mean loss
    over all n·B rows. The gradient that reaches the layer is then −g/(nB), and it hands −v/B to the members, so that
    each moves along (1/B)(∂h_i/∂w_i)ᵀ v_i. Whatever comes behind the layer, such as a shared head, gets the gradient of
    the mean loss. In eval mode, under no_grad, or for input that needs no gradient, the input itself is returned.
    Features that are not finite are refused. Under torch.compile, which cannot, and on a GPU, which would have to be
    waited for, they give gradients that are not.

    Args:
        prior, kernel, rank, subspace, rule: as in `transport`.
        count: how many data terms a member's mean loss stands for, where that is not B: B·T for T tokens a sequence,
            the size of the data set for particles that are weights.
        scale: what the mean loss is multiplied by before `backward`: 1/k for k accumulated micro-batches, a
            GradScaler's scale, n where members' losses are summed. Set the attribute where it changes as you go:
            `layer.scale = scaler.get_scale()`.
        group: processes of torch.distributed that have the same members and other data points, with a mean loss over
            their own; gradients of the weights are averaged over them afterwards, as DistributedDataParallel does.
            `Ensemble.shard` sets it.
    """

    def __init__(
        self,
        prior: Prior = Cauchy(),
        kernel: Kernel = RBF(),
        rank: int | None = None,
        subspace: Subspace = "dominant",
        rule: Rule = WGD(),
        *,
        count: int | None = None,
        scale: float | Tensor = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.prior, self.kernel, self.rank, self.subspace, self.rule = prior, kernel, rank, subspace, rule
        self.count, self.scale = count, scale
        if group is not None:
            self.group = group
        self._law().check()
        self._check_factors()

    group: dist.ProcessGroup | None = None

    def forward(self, features: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and features.requires_grad):
            return features
        if features.ndim < 2 or features.numel() == 0:
            raise ValueError(
                "ParticleLayer needs features (members, batch, …) with at least one member and one data point; "
                f"got shape {tuple(features.shape)}."
            )
        law = self._law()
        law.check(features.shape[0])
        self._check_factors()
        if features.device.type == "cpu" and not torch.compiler.is_compiling():
            _refuse_non_finite(features, "features")
        count = features.shape[1] if self.count is None else self.count
        scale = self.scale.clone() if isinstance(self.scale, Tensor) else self.scale
        out: Tensor = _Transport.apply(features, law, count, scale, self.group)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        parts = [f"{self.prior}, {self.kernel}, rank={self.rank}, subspace={self.subspace!r}, {self.rule}"]
        return ", ".join(parts + ([] if self.count is None else [f"count={self.count}"]))

    def _law(self) -> "_Law":
        return _Law(self.prior, self.kernel, self.rank, self.subspace, self.rule)

    def _check_factors(self) -> None:
        for name, value in (("count", self.count), ("scale", self.scale)):
            if value is None or isinstance(value, Tensor):
                continue
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"ParticleLayer needs a positive finite {name}; got {value!r}.")


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(
        features: Tensor, law: "_Law", count: int, scale: float | Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        # A copy, so that what comes behind may work in place (a ReLU, say) while the backward pass needs the features.
        return features.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        features, ctx.law, ctx.count, ctx.scale, ctx.group = inputs
        ctx.save_for_backward(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (features,) = ctx.saved_tensors
        n = features.shape[0]
        # A gradient that overflowed must reach the optimiser as such: GradScaler then skips the step. So no error here.
        v, finite = _ascent(
            features.reshape(n, -1),
            grad.reshape(n, -1),
            ctx.law,
            grad_factor=-n * ctx.count / ctx.scale,
            v_factor=-ctx.scale / ctx.count,
            group=ctx.group,
        )
        return v.masked_fill_(~finite, math.nan).view_as(features), None, None, None, None


@dataclass(frozen=True)
class _Law:
    """The arguments that `transport` and `ParticleLayer` share."""

    prior: Prior
    kernel: Kernel
    rank: int | None
    subspace: Subspace
    rule: Rule

    def check(self, n: int | None = None) -> None:
        whole = isinstance(self.rank, Integral) and not isinstance(self.rank, bool)
        if self.rank is not None and not (whole and self.rank >= 1):
            raise ValueError(
                f"rank must be a whole number of directions, at least 1, or None for no projection; got {self.rank!r}."
            )
        if n is not None and self.rank is not None and self.rank > n:
            raise ValueError(
                f"rank={self.rank} exceeds the {n} member{'s' * (n > 1)}, whose gradients span at most {n} direction"
                f"{'s' * (n > 1)}; use rank ≤ {n}, or None for no projection."
            )
        if not callable(getattr(self.prior, "score", None)):
            raise ValueError(f"prior must be an object with a score, such as Cauchy(1e-3); got {self.prior!r}.")
        if not callable(self.kernel):
            raise ValueError(f"kernel must map squared distances to values and slopes, as RBF(); got {self.kernel!r}.")
        if not callable(getattr(self.rule, "weights", None)):
            raise ValueError(f"rule must be an update rule such as WGD(); got {self.rule!r}.")
        if self.subspace not in ("dominant", "weakest"):
            raise ValueError(f'subspace must be "dominant" or "weakest"; got {self.subspace!r}.')
        if isinstance(self.rule, SVGD) and self.rule.temperature > 0 and self.kernel == RBF("official"):
            raise ValueError(
                "SVGD's Langevin noise has the kernel matrix as its covariance, and bandwidth='official' gives none "
                "that is symmetric; use bandwidth='median', a number, or temperature=0."
            )


class _Interaction(NamedTuple):
    drive_nn: Tensor | None
    """A."""
    push_nn: Tensor
    """C."""
    noise_nn: Tensor | None
    """F."""


def _ascent(
    h_nd: Tensor,
    g_nd: Tensor,
    law: _Law,
    *,
    grad_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`v_factor` · v for the data gradient `grad_factor` · g, and whether all input was finite."""
    if h_nd.device.type == "mps":  # no float64 there
        v, finite = _ascent(h_nd.cpu(), g_nd.cpu(), law, grad_factor=grad_factor, v_factor=v_factor, group=group)
        return v.to(h_nd.device), finite.to(h_nd.device)
    projected, alone = law.rank is not None, h_nd.shape[0] == 1 or isinstance(law.rule, MAP)
    xx_nn, hx_nn, finite = _grams(h_nd, g_nd, grad_factor, projected, alone, group)
    act = None if alone else _interaction(xx_nn, hx_nn, law)
    v_nd = torch.empty_like(h_nd, memory_format=torch.contiguous_format)
    for part, h, g in _slices(h_nd, g_nd, grad_factor):
        s = g + law.prior.score(h)
        if act is not None:
            s = s if act.drive_nn is None else act.drive_nn @ s
            s = torch.addmm(s, act.push_nn, g if projected else _centred(h), alpha=-1)
        if law.rule.temperature > 0:
            noise = torch.randn_like(h)
            noise = noise if act is None or act.noise_nn is None else act.noise_nn @ noise
            s = s + math.sqrt(2 * law.rule.temperature / law.rule.step_size) * noise
        v_nd[:, part] = (s * v_factor).to(v_nd.dtype)
    return v_nd, finite


def _grams(
    h_nd: Tensor,
    g_nd: Tensor,
    grad_factor: float | Tensor,
    projected: bool,
    alone: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """X Xᵀ, (H − h_0) Xᵀ and whether all is finite; X = G, or without projection H − h_0."""
    n = h_nd.shape[0]
    xx_nn = torch.zeros(n, n, dtype=torch.float64, device=h_nd.device)
    hx_nn, total = xx_nn.clone(), xx_nn.new_zeros(())
    for _, h, g in _slices(h_nd, g_nd, grad_factor):
        total = total + h.sum() + g.sum()
        if not alone:
            h = _centred(h)
            x = g if projected else h
            xx_nn = torch.addmm(xx_nn, x, x.T)
            hx_nn = torch.addmm(hx_nn, h, x.T) if projected else xx_nn
    if group is not None:
        sums = torch.cat([xx_nn.flatten(), hx_nn.flatten(), total.view(1)])
        dist.all_reduce(sums, group=group)
        xx_nn, hx_nn, total = sums[: n * n].view(n, n), sums[n * n : -1].view(n, n), sums[-1]
    finite = torch.isfinite(total) & torch.isfinite(xx_nn).all() & torch.isfinite(hx_nn).all()
    # The eigenproblem must not meet what is not finite; the caller learns of it from the flag.
    return torch.where(finite, xx_nn, 0.0), torch.where(finite, hx_nn, 0.0), finite


def _centred(h: Tensor) -> Tensor:
    """H − h_0 with h_0 the middle one of three members, number by number.

    This removes the large part that positive features have in common, even if one of the three is an outlier, and is
    exactly zero for identical members. A mean would be neither.
    """
    n = h.shape[0]
    a, b, c = h[0], h[n // 2], h[n - 1]
    return h - torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


def _interaction(xx_nn: Tensor, hx_nn: Tensor, law: _Law) -> _Interaction:
    """A, C and F from the two n × n matrices."""
    if law.rank is None:
        norms_n = xx_nn.diagonal()
        sq_nn = norms_n[:, None] + norms_n[None] - 2 * xx_nn
        coords = lift = None
    else:
        lift = _basis(xx_nn, law.rank, law.subspace)
        coords = hx_nn @ lift
        norms_n = coords.square().sum(1)
        sq_nn = torch.cdist(coords, coords, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Distances of this size are the rounding errors of particles at one place.
    sq_nn = torch.where(sq_nn > 1e-13 * (norms_n[:, None] + norms_n[None]), sq_nn, 0.0)
    k_nn, slope_nn = law.kernel(sq_nn)
    w_nn = torch.where(sq_nn > 0, 2 * slope_nn, 0.0)
    drive, density, noise = law.rule.weights(k_nn)
    push_nn = density @ (torch.diag(w_nn.sum(1)) - w_nn)
    if lift is not None and coords is not None:
        push_nn = push_nn @ coords @ lift.T
    return _Interaction(drive, push_nn, noise)


def _basis(gg_nn: Tensor, rank: int, subspace: Subspace) -> Tensor:
    """M with Ψ_r = Gᵀ M: the chosen eigenvectors of G Gᵀ over their singular values, zero columns for the others."""
    n = gg_nn.shape[0]
    eigenvalues, u_nn = torch.linalg.eigh(gg_nn)  # ascending
    tolerance = 10 * n * torch.finfo(gg_nn.dtype).eps * eigenvalues[-1]
    exists = eigenvalues > tolerance.clamp_min(0)
    place = exists.cumsum(0) if subspace == "weakest" else exists.flip(0).cumsum(0).flip(0)
    chosen = exists & (place <= rank)
    inverse_n = torch.where(chosen, eigenvalues.clamp_min(torch.finfo(gg_nn.dtype).tiny).rsqrt(), 0.0)
    m_nn: Tensor = u_nn * inverse_n
    return m_nn


def _slices(h_nd: Tensor, g_nd: Tensor, grad_factor: float | Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Columns of H and of grad_factor · G in float64, an eighth at a time, and less where that is much."""
    n, d = h_nd.shape
    width = max(1, min(max(n * d // 8, _SLICE_NUMBERS // 32), _SLICE_NUMBERS) // n)
    for start in range(0, d, width):
        part = slice(start, min(start + width, d))
        yield part, h_nd[:, part].double(), g_nd[:, part].double() * grad_factor


_SLICE_NUMBERS = 2**16


def _check_arrays(particles: Tensor, loglik_grad: Tensor) -> None:
    if not (isinstance(particles, Tensor) and isinstance(loglik_grad, Tensor)):
        raise TypeError(
            f"transport takes two tensors; got {type(particles).__name__} and {type(loglik_grad).__name__}."
        )
    if particles.ndim != 2 or particles.numel() == 0:
        raise ValueError(
            "transport needs particles (n, d) with at least one particle and one number in each; "
            f"got shape {tuple(particles.shape)}."
        )
    if loglik_grad.shape != particles.shape:
        raise ValueError(
            "transport needs one gradient for each particle: particles have shape "
            f"{tuple(particles.shape)}, loglik_grad has {tuple(loglik_grad.shape)}."
        )
    if not (particles.is_floating_point() and loglik_grad.is_floating_point()):
        raise ValueError(
            f"transport needs real floating-point tensors; got {particles.dtype} particles and {loglik_grad.dtype} "
            "gradients."
        )
    if particles.device != loglik_grad.device:
        raise ValueError(
            f"particles are on {particles.device} and loglik_grad is on {loglik_grad.device}; move one to the other."
        )


def _refuse_non_finite(x: Tensor, name: str) -> None:
    if not torch.isfinite(x).all():
        members = [i for i in range(x.shape[0]) if not torch.isfinite(x[i]).all()]
        raise NonFiniteError(
            members,
            f"The {name} of member{'s' * (len(members) > 1)} {', '.join(map(str, members))} contain NaN or infinity; "
            "look for a learning rate that is too high or for bad data before this point.",
        )
