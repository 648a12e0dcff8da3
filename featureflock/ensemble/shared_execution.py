"""How an ensemble computes what its members share: the trunk, and members in one network (sharing.py)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featureflock.distributed.mesh import Axis
from featureflock.ensemble.execution import Execution, execute, map_tensors
from featureflock.ensemble.inputs import NOTHING
from featureflock.ensemble.member_layers import scale_gradient
from featureflock.ensemble.sharing import SharedMembers


def execute_shared(
    members: SharedMembers, part: slice, factor: float, x: Any, execution: Execution, kwargs: dict[str, Any]
) -> Tensor | list[Tensor]:
    """Outputs of some members for one input: in one call, or one after another with low memory."""
    if execution == "low_memory":
        views = [_OneMember(members, i, factor) for i in range(part.start, part.stop)]
        return execute(views, None, [x] * len(views), execution, kwargs)
    with members.computing(part, factor):
        out: Tensor = members(**kwargs) if x is NOTHING else members(x, **kwargs)
    return out


def run_trunk(trunk: nn.Module, x: Any, kwargs: dict[str, Any], factor: float) -> Any:
    """Output of a trunk whose parameters get `factor` times the gradient; inputs get their ordinary gradient."""
    scaled = factor if any(p.requires_grad for p in trunk.parameters()) else 1.0
    x, kwargs = map_tensors(partial(scale_gradient, factor=1 / scaled), (x, kwargs))
    out = trunk(**kwargs) if x is NOTHING else trunk(x, **kwargs)
    return map_tensors(partial(scale_gradient, factor=scaled), out)


@contextmanager
def unmodified(trunk_output: Any) -> Iterator[None]:
    """Raise ValueError if members modify the output of the trunk, which the others need too."""
    versions: list[tuple[Tensor, int]] = []
    if not torch.compiler.is_compiling():
        map_tensors(lambda t: None if t.is_inference() else versions.append((t, t._version)), trunk_output)
    yield
    if any(t._version != version for t, version in versions):
        raise ValueError("An extractor modifies the output of the trunk in place; let it copy its input first.")


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them is trained."""
    return any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters())


def gather_rows(tensors: Sequence[Tensor], axis: Axis, n: int) -> None:
    """Take the rows of other processes from them, in place, for buffers and gradients of parameters (n, …)."""
    if axis.size == 1:
        return
    part = axis.local_slice(n)
    tensors = [t for each in tensors if (t := each.grad if isinstance(each, nn.Parameter) else each) is not None]
    for dtype in {t.dtype for t in tensors}:
        group = [t for t in tensors if t.dtype == dtype]
        rows = axis.all_gather_rows(torch.cat([t.reshape(n, -1)[part] for t in group], 1), n)
        for t, columns in zip(group, rows.split([t[0].numel() for t in group], 1), strict=True):
            t.copy_(columns.reshape(t.shape))


class _OneMember(nn.Module):
    """A view of one member, without copies of weights."""

    def __init__(self, members: SharedMembers, i: int, factor: float) -> None:
        super().__init__()
        self.shared, self.part, self.factor = members, slice(i, i + 1), factor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.shared.computing(self.part, self.factor):
            out: Tensor = self.shared(*args, **kwargs).squeeze(0)
        return out
