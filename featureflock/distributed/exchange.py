"""Exchange along a row of the mesh, so that each process has all n members for a part of the examples.

    part = exchange(own, axis, n)                            # (n_m, B, …) → (n, B_m, …), an all-to-all
    logits = exchange_back(head, part, axis, B)              # (n, B_m, …) → (n, B, C), by a gather

What comes after the members is then computed once, and not by each process of the row. Each of them computes the loss
from all logits. Its gradient for a part gives the head of that process a part of its gradient, of which the mean over
the row is taken later (gradients.py). So that this is their sum, gradients are multiplied by M inside the head.

Shapes: n members, n_m of this process, B examples in the row, B_m in the part of this process, M processes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from featureflock.distributed.mesh import Axis


def exchange(own: Tensor, axis: Axis, n: int) -> Tensor:
    """Return the features (n, B_m, …) of all members for this process's part of the examples.

    The result requires gradients in every process, because all of them take part in the backward pass.
    """
    own = own if own.requires_grad else own.detach().requires_grad_()
    part: Tensor = _Exchange.apply(own, axis, n)  # type: ignore[no-untyped-call]
    return part


def exchange_back(head: Callable[[Tensor], Tensor], part: Tensor, axis: Axis, count: int) -> Tensor:
    """Return the outputs (n, B, …) of the head for all `count` examples, of which each process computes its part."""
    outputs = head(_scale_gradient(part, 1 / axis.size))
    return _GatherParts.apply(_scale_gradient(outputs, axis.size), axis, count)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, n: int) -> Tensor:
        """(n_m, B, …) → (n, B_m, …)."""
        ctx.axis, ctx.count = axis, own.shape[1]
        parts = own.split(axis.part_sizes(own.shape[1]), 1)
        received = own.new_empty(n, *parts[axis.rank].shape[1:])
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [members * received[0].numel() for members in axis.part_sizes(n)]
        dist.all_to_all_single(received.view(-1), sent, lengths, [part.numel() for part in parts], axis.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """(n, B_m, …) → (n_m, B, …)."""
        axis, count, grad = ctx.axis, ctx.count, grad.contiguous()
        members, shape = axis.part_sizes(len(grad)), grad.shape[2:]
        sizes, here = axis.part_sizes(count), members[axis.rank]
        lengths = [here * size * shape.numel() for size in sizes]
        received = grad.new_empty(sum(lengths))
        dist.all_to_all_single(received, grad.view(-1), lengths, [k * grad[0].numel() for k in members], axis.group)
        pieces = zip(received.split(lengths), sizes, strict=True)
        return torch.cat([piece.view(here, size, *shape) for piece, size in pieces], 1), None, None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, count: int) -> Tensor:
        ctx.part = axis.local_slice(count)
        return axis.all_gather_rows(part.transpose(0, 1), count).transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[:, ctx.part], None, None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x; in the backward pass, multiply its gradient by the factor."""
    x = x.view_as(x)
    x.register_hook(lambda grad: grad * factor)
    return x
