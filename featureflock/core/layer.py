"""The particle layer: identity in the forward pass, the direction of Algorithm 1 in the backward pass.

    layer = ParticleLayer(prior=Cauchy(1e-3), rank=5)
    features = torch.stack([f(x) for f in extractors])               # (n, B, H)
    logits = head(layer(features))                                   # (n, B, C)
    F.cross_entropy(logits.flatten(0, 1), y.repeat(n)).backward()    # extractors receive the paper's update

The layer infers the data gradient from the gradient of the loss, so it must know the scale of the loss. With the layer
alone the loss must be the plain mean, or `scale` must say what it is multiplied by. `particle_loss` and the methods
have no such restriction: their loss may be scaled, averaged and accumulated like any other.

    loss = particle_loss(features, lambda h: F.cross_entropy(head(h).flatten(0, 1), y.repeat(n)), layer)
    (loss / 4).backward()                                            # one of four accumulated micro-batches

It works by a second output of the layer's autograd function: a zero that is added to the loss. The gradient that
arrives there in the backward pass is the scale of the loss.

The repulsion is one vector for the whole batch, of norm about 2 log n / ‖z_i − z_j‖, so its effect on each data point
falls as 1/B, while the data gradient of a data point does not depend on B. `reference_batch` keeps the strength that
`repulsion` has at that batch size, whatever the batch size is.

For features (n, B, T, H) of sequences, `layer(features, mask=mask)` leaves out padded tokens: a particle consists of
the features of the other tokens, as if the padding did not exist.

Shapes: n members, B data points, T tokens, H features, C classes.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import WGD, Rule
from featureflock.core.transport import Subspace, TransportConfig, ascent_direction, check_finite
from featureflock.core.value_checks import readable

_LAST_SHAPES: "WeakKeyDictionary[ParticleLayer, tuple[int, int]]" = WeakKeyDictionary()
"""Members and data points of the last call of each layer."""


class ParticleLayer(nn.Module):
    """The whole method as one layer: identity in the forward pass, the direction of Algorithm 1 in the backward pass.

    Input and output have shape (n, B, …): the features of n members for the same B data points. Train with the ordinary
    mean loss over all n·B rows. The incoming gradient is then −g/(nB), and the layer passes −v/B to the members, so
    that each moves along (1/B)(∂h_i/∂w_i)ᵀ v_i. Modules after the layer, such as a shared head, receive the gradient of
    the mean loss. In eval mode, under no_grad, or for input that needs no gradient, the input itself is returned.

    Non-finite features raise `NonFiniteError` on a CPU. Under torch.compile, and on a GPU, where the check would force
    a synchronisation, they give non-finite gradients instead.

    Args:
        prior, kernel, rank, subspace, rule, repulsion: as in `transport`.
        reference_batch: batch size that `repulsion` refers to. For a batch of B the repulsion is multiplied by
            B / reference_batch, so that its effect on each data point stays the same. None for no correction.
        count: number of likelihood terms that a member's mean loss averages, if it is not B: "tokens" for a loss of
            each token (those that are not masked, of all B·T), the size of the data set for particles that are weights.
            If None, methods take it from the task.
        scale: factor of the mean loss in `backward`; needed whenever the loss is not the plain mean and is not made by
            `particle_loss` or a method: 1/k for k accumulated micro-batches, a GradScaler's scale, n for losses
            summed over members. Update the attribute if it changes: `layer.scale = scaler.get_scale()`.
        group: processes of torch.distributed with the same members and different data points. Each computes the mean
            loss of its own data points, and weight gradients are averaged afterwards, as DistributedDataParallel does:
            pass `group=torch.distributed.group.WORLD` there. `Ensemble.shard` sets it.
    """

    group: dist.ProcessGroup | None = None
    sees_whole_batch: bool = False
    """Set by `Ensemble.shard` where processes share members but not data points, so that `group` is not needed."""
    _scale_tokens: list[Tensor] | None = None
    _task_count: int | Tensor | None = None
    _batch: int | None = None

    def __init__(
        self,
        prior: Prior = Cauchy(),
        kernel: Kernel = RBF(),
        rank: int | None = None,
        subspace: Subspace = "dominant",
        rule: Rule = WGD(),
        repulsion: float = 1.0,
        *,
        reference_batch: int | None = None,
        count: int | Literal["tokens"] | None = None,
        scale: float | Tensor = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.prior, self.kernel, self.rank, self.subspace, self.rule = prior, kernel, rank, subspace, rule
        self.repulsion, self.reference_batch, self.count, self.scale = repulsion, reference_batch, count, scale
        if group is not None:
            self.group = group
        self._config().check()
        self._check_factors()

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features.

        Args:
            features: (n, B, …).
            mask: (B, T), bool or 0 and 1 as in an attention mask, for features (n, B, T, …): tokens with 0 take no part
                in prior and repulsion, and get the gradient of the loss alone.
        """
        if not isinstance(features, Tensor):
            got = type(features).__name__
            raise ValueError(f"ParticleLayer takes a tensor (members, batch, …); got {got}. Use torch.stack.")
        if not (self.training and torch.is_grad_enabled() and features.requires_grad):
            return features
        if features.is_complex():
            raise ValueError(f"ParticleLayer needs features that are real numbers; got {features.dtype}.")
        if features.ndim < 2 or (features.numel() == 0 and self._batch is None):
            raise ValueError(
                "ParticleLayer needs features (members, batch, …) with at least one member and one data point; "
                f"got shape {tuple(features.shape)}."
            )
        if mask is not None:
            mask = _checked_mask(mask, features)
        config = self._config()
        config.check(features.shape[0])
        self._check_factors()
        if not torch.compiler.is_compiling():
            self._check_order(features)
            self._warn_about_parts()
            if readable(features):
                check_finite(features if mask is None else features.masked_fill(~mask, 0.0), "features")
        count = self._count(features, mask)
        scale = self.scale.clone() if isinstance(self.scale, Tensor) else self.scale
        ratio = None if self.reference_batch is None else features.shape[1] / self.reference_batch
        out: Tensor
        out, token = _Transport.apply(  # type: ignore[no-untyped-call]
            features, config, count, None if self._scale_tokens is not None else scale, ratio, self.group, mask
        )
        if self._scale_tokens is not None:
            self._scale_tokens.append(token)
        return out

    @contextmanager
    def loss_scale(self, count: int | Tensor | None = None) -> Iterator[Callable[[Tensor], Tensor]]:
        """Make a loss that may be scaled and accumulated: call the layer inside, and pass the mean loss through.

        with layer.loss_scale() as scalable:
            loss = scalable(F.cross_entropy(head(layer(features)).flatten(0, 1), y.repeat(n)))

        `count` is the number of likelihood terms that the loss averages, for a layer without a count; by default B.
        """
        outer, self._scale_tokens = (self._scale_tokens, self._task_count), []
        self._task_count = count
        tokens = self._scale_tokens
        try:
            yield lambda loss: loss + torch.stack(tokens).sum().to(loss) if tokens else loss
        finally:
            self._scale_tokens, self._task_count = outer

    @contextmanager
    def divided(self, group: dist.ProcessGroup, batch: int) -> Iterator[None]:
        """Call the layer inside with a part, which may be empty, of the `batch` data points of one mean loss.

        The other parts, and those of further losses, are on the other processes of the group.
        """
        outer = self.group, self._batch
        self.group, self._batch = group, batch
        try:
            yield
        finally:
            self.group, self._batch = outer

    def extra_repr(self) -> str:
        parts = [f"{self.prior}, {self.kernel}, rank={self.rank}, subspace={self.subspace!r}, {self.rule}"]
        parts += [f"repulsion={self.repulsion}"] * (self.repulsion != 1)
        parts += [f"reference_batch={self.reference_batch}"] * (self.reference_batch is not None)
        return ", ".join(parts + ([] if self.count is None else [f"count={self.count}"]))

    def _count(self, features: Tensor, mask: Tensor | None) -> float | Tensor:
        if self.count is None:
            batch = features.shape[1] if self._batch is None else self._batch
            return batch if self._task_count is None else self._task_count
        if self.count != "tokens":
            return self.count
        if features.ndim < 3:
            raise ValueError(f'count="tokens" needs features (members, batch, tokens, …); got {tuple(features.shape)}.')
        return features.shape[1:3].numel() if mask is None else mask.sum().double().clamp_min(1)

    def _config(self) -> TransportConfig:
        return TransportConfig(self.prior, self.kernel, self.rank, self.subspace, self.rule, self.repulsion)

    def _check_order(self, features: Tensor) -> None:
        """Raise ValueError if the first dimension varies and the second does not: (batch, members, …)."""
        members, batch = features.shape[:2]
        before = _LAST_SHAPES.get(self, (members, batch))
        _LAST_SHAPES[self] = members, batch
        if features.ndim > 2 and members != before[0] and batch == before[1]:
            del _LAST_SHAPES[self]
            raise ValueError(
                f"ParticleLayer got features of {before[0]} and then of {members} members, each with {batch} data "
                "points; features must be (members, batch, …): transpose them if they are (batch, members, …), and use "
                "another layer for another number of members."
            )

    def _warn_about_parts(self) -> None:
        """Warn if other processes have other parts of the batch, which the repulsion would ignore."""
        parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if parallel and self.group is None and not self.sees_whole_batch:
            warnings.warn(
                "ParticleLayer sees only this process's part of the batch, so the repulsion differs from that of one "
                "process; pass group=torch.distributed.group.WORLD to ParticleLayer, or use Ensemble.shard.",
                stacklevel=3,
            )

    def _check_factors(self) -> None:
        for name, value in (
            ("count", self.count),
            ("scale", self.scale),
            ("reference_batch", self.reference_batch),
        ):
            if value is None or isinstance(value, Tensor) or (name == "count" and value == "tokens"):
                continue
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"ParticleLayer needs a positive finite {name}; got {value!r}.")


def particle_loss(features: Tensor, loss_fn: Callable[[Tensor], Tensor], layer: ParticleLayer) -> Tensor:
    """Return the mean loss, with the update of Algorithm 1 as its gradient, at any scale.

        loss = ff.particle_loss(features, lambda h: F.cross_entropy(head(h).flatten(0, 1), y.repeat(n)), layer)
        (loss / k).backward()

    Unlike a loss behind the bare layer, it may be multiplied by any factor, averaged and accumulated like any loss:
    with gradient accumulation, a GradScaler, or a weight in a sum of losses. `layer.scale` is not needed.

    Args:
        features: (n, B, …), the features of n members for the same B data points.
        loss_fn: maps features to the mean loss over all n·B rows, through the shared head.
        layer: the particle layer, in training mode.
    """
    if not isinstance(layer, ParticleLayer) or not callable(loss_fn):
        got = f"{type(loss_fn).__name__} and {type(layer).__name__}"
        raise ValueError(f"particle_loss takes features, a function of them and a ParticleLayer; got {got}.")
    with layer.loss_scale() as scalable:
        loss = loss_fn(layer(features))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return the mean loss, a tensor with one number; got {got}.")
        return scalable(loss)


class _Transport(torch.autograd.Function):
    """The identity, and a zero whose gradient is the scale of the loss that it is added to."""

    @staticmethod
    def forward(
        features: Tensor,
        config: TransportConfig,
        count: float | Tensor,
        scale: float | Tensor | None,
        batch_ratio: float | None,
        group: dist.ProcessGroup | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # A copy: the backward pass needs the features, and the next module may overwrite its input (in-place ReLU).
        return features.clone(), features.new_zeros((), dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        features, ctx.config, ctx.count, ctx.scale, ctx.batch_ratio, ctx.group, mask = inputs
        ctx.save_for_backward(features, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, loss_scale: Tensor) -> tuple[Tensor | None, ...]:
        features, mask = ctx.saved_tensors
        n, data_grad = features.shape[0], grad
        if mask is not None:  # equal coordinates add nothing to distances, zero gradients nothing to the subspace
            features, grad = features.masked_fill(~mask, 0.0), grad.masked_fill(~mask, 0.0)
        scale, divisor = ctx.scale, ctx.scale
        if scale is None:
            scale = (loss_scale.cpu() if loss_scale.device.type == "mps" else loss_scale).double()
            divisor = torch.where(scale == 0, 1.0, scale)
        v, finite = ascent_direction(
            features.reshape(n, -1),
            grad.reshape(n, -1),
            ctx.config,
            grad_factor=-n * ctx.count / divisor,
            v_factor=-scale / ctx.count,
            batch_ratio=ctx.batch_ratio,
            group=ctx.group,
        )
        # A gradient that overflowed must reach the optimiser as NaN: GradScaler then skips the step. So no error here.
        v = v.masked_fill_(~finite, math.nan).view_as(features)
        v = v if mask is None else torch.where(mask, v, n * data_grad)
        return v, None, None, None, None, None, None


def _checked_mask(mask: Tensor, features: Tensor) -> Tensor:
    """The mask as bool (1, B, T, 1, …), for features (n, B, T, …)."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"mask must be a tensor of bool, or of integers with 1 for tokens and 0 for padding; got {got}."
        )
    if mask.ndim < 1 or mask.shape != features.shape[1 : 1 + mask.ndim]:
        shapes = f"features {tuple(features.shape)} and mask {tuple(mask.shape)}"
        raise ValueError(f"mask must be (batch, tokens) for features (members, batch, tokens, …); got {shapes}.")
    return mask.bool().view(1, *mask.shape, *[1] * (features.ndim - 1 - mask.ndim))
