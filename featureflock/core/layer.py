"""The particle layer: identity in the forward pass, the direction of Algorithm 1 in the backward pass.

    layer = ParticleLayer(prior=Cauchy(1e-3), rank=5)
    features = torch.stack([f(x) for f in extractors])               # (n, B, H)
    logits = head(layer(features))                                   # (n, B, C)
    F.cross_entropy(logits.flatten(0, 1), y.repeat(n)).backward()    # extractors receive the paper's update

Shapes: n members, B data points, H features, C classes.
"""

import math
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import WGD, Rule
from featureflock.core.transport import Subspace, TransportConfig, ascent_direction, check_finite


class ParticleLayer(nn.Module):
    """The whole method as one layer: identity in the forward pass, the direction of Algorithm 1 in the backward pass.

    Input and output have shape (n, B, …): the features of n members for the same B data points. Train with the ordinary
    mean loss over all n·B rows. The incoming gradient is then −g/(nB), and the layer passes −v/B to the members, so
    that each moves along (1/B)(∂h_i/∂w_i)ᵀ v_i. Modules after the layer, such as a shared head, receive the gradient of
    the mean loss. In eval mode, under no_grad, or for input that needs no gradient, the input itself is returned.

    Non-finite features raise `NonFiniteError` on a CPU. Under torch.compile, and on a GPU, where the check would force
    a synchronisation, they give non-finite gradients instead.

    Args:
        prior, kernel, rank, subspace, rule: as in `transport`.
        count: number of data terms that a member's mean loss averages, if it is not B: B·T for sequences of T tokens,
            the size of the data set for particles that are weights.
        scale: factor of the mean loss in `backward`: 1/k for k accumulated micro-batches, a GradScaler's scale, n for
            losses summed over members. Update the attribute if it changes: `layer.scale = scaler.get_scale()`.
        group: processes of torch.distributed with the same members and different data points. Each computes the mean
            loss of its own data points, and weight gradients are averaged afterwards, as DistributedDataParallel does.
            `Ensemble.shard` sets it.
    """

    group: dist.ProcessGroup | None = None

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
        self._config().check()
        self._check_factors()

    def forward(self, features: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and features.requires_grad):
            return features
        if features.ndim < 2 or features.numel() == 0:
            raise ValueError(
                "ParticleLayer needs features (members, batch, …) with at least one member and one data point; "
                f"got shape {tuple(features.shape)}."
            )
        config = self._config()
        config.check(features.shape[0])
        self._check_factors()
        if features.device.type == "cpu" and not torch.compiler.is_compiling():
            check_finite(features, "features")
        count = features.shape[1] if self.count is None else self.count
        scale = self.scale.clone() if isinstance(self.scale, Tensor) else self.scale
        out: Tensor = _Transport.apply(features, config, count, scale, self.group)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        parts = [f"{self.prior}, {self.kernel}, rank={self.rank}, subspace={self.subspace!r}, {self.rule}"]
        return ", ".join(parts + ([] if self.count is None else [f"count={self.count}"]))

    def _config(self) -> TransportConfig:
        return TransportConfig(self.prior, self.kernel, self.rank, self.subspace, self.rule)

    def _check_factors(self) -> None:
        for name, value in (("count", self.count), ("scale", self.scale)):
            if value is None or isinstance(value, Tensor):
                continue
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"ParticleLayer needs a positive finite {name}; got {value!r}.")


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(
        features: Tensor, config: TransportConfig, count: int, scale: float | Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        # A copy: the backward pass needs the features, and the next module may overwrite its input (in-place ReLU).
        return features.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        features, ctx.config, ctx.count, ctx.scale, ctx.group = inputs
        ctx.save_for_backward(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (features,) = ctx.saved_tensors
        n = features.shape[0]
        v, finite = ascent_direction(
            features.reshape(n, -1),
            grad.reshape(n, -1),
            ctx.config,
            grad_factor=-n * ctx.count / ctx.scale,
            v_factor=-ctx.scale / ctx.count,
            group=ctx.group,
        )
        # A gradient that overflowed must reach the optimiser as NaN: GradScaler then skips the step. So no error here.
        return v.masked_fill_(~finite, math.nan).view_as(features), None, None, None, None
