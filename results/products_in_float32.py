"""bfloat16 training at the speed of float32, on a CPU without bfloat16 instructions.

    python results/products_in_float32.py reproduce repulsion-strength --scale laptop --out runs --shard 1/2

Runs a command of featureflock with linear layers and convolutions under bfloat16 autocast computed from the same
bfloat16 numbers in float32, then rounded to bfloat16. PyTorch's own kernels add up in float32 too, so only the order of
summation differs. On a CPU with AVX-512 but without its bfloat16 instructions, products are four times as fast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.cli.main import main

_linear, _conv2d = F.linear, F.conv2d


def install() -> None:
    """Replace F.linear and F.conv2d in this process."""
    F.linear, F.conv2d = linear, conv2d  # type: ignore[assignment]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; under bfloat16 autocast with the products in float32."""
    if not _in_bfloat16():
        return _linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _Linear.apply(_rounded(x), _rounded(weight), _rounded(bias))  # type: ignore[no-untyped-call]
    return result


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *others: Any
) -> Tensor:
    """F.conv2d; under bfloat16 autocast with the products in float32, without dilation and groups."""
    if not _in_bfloat16() or isinstance(padding, str) or set(others) - {1, (1, 1)}:
        return _conv2d(x, weight, bias, stride, padding, *others)
    sizes = [[size, size] if isinstance(size, int) else list(size) for size in (stride, padding)]
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _Conv2d.apply(_rounded(x), _rounded(weight), _rounded(bias), *sizes)  # type: ignore[no-untyped-call]
    return result


def _in_bfloat16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _rounded(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.bfloat16)


def _exact(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        x, weight = x.float(), weight.float()
        ctx.save_for_backward(x, weight)
        return _rounded(_linear(x, weight, _exact(bias)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.float().flatten(0, -2)
        return (
            _rounded((rows @ weight).view(x.shape)) if for_x else None,
            _rounded(rows.t() @ x.flatten(0, -2)) if for_weight else None,
            _rounded(rows.sum(0)) if for_bias else None,
        )


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Any:
        x, weight = x.float(), weight.float()
        ctx.save_for_backward(x, weight)
        ctx.sizes = None if bias is None else [len(bias)], stride, padding
        return _rounded(_conv2d(x, weight, _exact(bias), stride, padding))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        bias, stride, padding = ctx.sizes
        grads = torch.ops.aten.convolution_backward(
            grad.float(), x, weight, bias, stride, padding, [1, 1], False, [0, 0], 1, needed
        )
        return *(_rounded(one) for one in grads), None, None


if __name__ == "__main__":
    install()
    main()
