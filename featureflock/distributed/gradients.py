"""Gradients summed over processes during the backward pass.

    reducer = GradientReducer(mesh, [(parameter, is_shared), …])
    loss.backward()          # the sum of a bucket of gradients starts as soon as all of them are known
    reducer.finish()         # gradients are those of the whole batch

The gradient of a member's parameter is averaged over the data axis, that of a shared parameter over the whole mesh:

    ∂L/∂w = Σ_d (B_d/B) ∂L_d/∂w              ∂L/∂θ = Σ_d Σ_m (B_d/B)/M ∂L_dm/∂θ

Buckets are filled in the reverse order of the parameters, about the order of the backward pass, and their sums start in
this order on every process, whatever the order in which it computes the gradients. The design and the sizes are those
of DistributedDataParallel. It cannot be used itself: it has one process group for all parameters, here there are two;
and it must be called in place of the module, but members may be computed by `torch.func`, or from weights behind a
particle layer, without a call of the module that has the parameters.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from featureflock.distributed.mesh import Mesh

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Size from which a bucket is full. The first of the members is small, so that communication starts early."""


@dataclass
class _Bucket:
    """Parameters whose gradients are summed by one collective."""

    is_shared: bool
    parameters: list[nn.Parameter]
    ready: set[nn.Parameter] = field(default_factory=set)
    """Parameters whose gradient this backward pass has computed."""
    total: Tensor | None = None
    work: Any = None


class GradientReducer:
    """Averages gradients over the processes of a mesh; see the module docstring.

    Args:
        mesh: the processes. Its `batch_fraction` must be set before the backward pass.
        parameters: the trained parameters, and whether each is shared by all members.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[tuple[nn.Parameter, bool]]) -> None:
        self.mesh, self.parameters = mesh, list(parameters)
        self._buckets = _buckets([(p, shared) for p, shared in parameters if self._axis(shared).size > 1])
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._started = 0
        this = weakref.ref(self)  # parameters must not keep process groups alive

        def on_gradient(parameter: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._on_gradient(parameter)

        self._handles = [p.register_post_accumulate_grad_hook(on_gradient) for p in self._bucket_of]

    def reduces(self, mesh: Mesh, parameters: Sequence[tuple[nn.Parameter, bool]]) -> bool:
        """Whether this is the reducer of these parameters on this mesh."""
        pairs = zip(self.parameters, parameters, strict=False)
        same = len(self.parameters) == len(parameters) and all(p is q and s == t for (p, s), (q, t) in pairs)
        return same and self.mesh is mesh

    def finish(self) -> None:
        """Wait for all sums, and replace the gradients. Buckets that are not complete are summed now."""
        while self._started < len(self._buckets):
            self._start_next()
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.work.wait()
                assert bucket.total is not None
                pieces = bucket.total.split([p.numel() for p in bucket.parameters])
                for p, piece in zip(bucket.parameters, pieces, strict=True):
                    if p.grad is not None:
                        p.grad.copy_(piece.view(p.shape))
        self._reset()

    def close(self) -> None:
        """Wait for sums that have started, and stop."""
        self._reset()
        for handle in self._handles:
            handle.remove()

    def _axis(self, is_shared: bool) -> Any:
        return self.mesh.world if is_shared else self.mesh.data

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if parameter in bucket.ready:  # a second backward pass, which adds to the gradients: sum them again
            self._reset()
        bucket.ready.add(parameter)  # type: ignore[arg-type]
        while self._started < len(self._buckets) and self._is_complete(self._buckets[self._started]):
            self._start_next()

    def _is_complete(self, bucket: _Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    @torch.no_grad()
    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
        weight = self.mesh.batch_fraction / (self.mesh.members.size if bucket.is_shared else 1)
        bucket.total = torch.cat([grad.reshape(-1) for grad in grads]).mul_(weight)
        bucket.work = dist.all_reduce(bucket.total, group=self._axis(bucket.is_shared).group, async_op=True)
        self._started += 1

    def _reset(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.total = bucket.work = None
            bucket.ready.clear()
        self._started = 0


def _buckets(parameters: Sequence[tuple[nn.Parameter, bool]]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    size, limit, previous = 0, 0, None
    for p, is_shared in reversed(parameters):
        kind = is_shared, p.dtype, p.device
        if kind != previous or size >= limit:
            buckets.append(_Bucket(is_shared, []))
            size, limit, previous = 0, BUCKET_BYTES if kind == previous else FIRST_BUCKET_BYTES, kind
        buckets[-1].parameters.append(p)
        size += p.nbytes
    return buckets
