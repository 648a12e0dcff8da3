"""Use our kernels for 3×3 convolutions in the graphs of torch.compile; networks need no change.

`torch.conv2d` in a graph becomes the operator `featureflock::convolution`, whose results and gradients are the same.
It computes convolutions and their gradients with respect to the input with `winograd`, and gradients with respect to
the weights with `weight_gradient`, where they are faster. This applies to float32, channels_last, padding 1, on a CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from featureflock.cpu_kernels import weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import load_kernel

_ARGUMENTS = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def kernels_problem() -> str | None:
    """Why our kernels cannot be used, as a clause; None if they can."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return f"they need AVX2 or AVX-512, and PyTorch uses {capability} here"
    if any(load_kernel(*kernel) is None for kernel in (weight_gradient.KERNEL, winograd.KERNEL)):
        return "no C compiler can compile them"
    return None


@torch.library.custom_op("featureflock::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """A 3×3 convolution with padding 1 and stride 1 or 2; float32, channels_last, on a CPU."""
    if stride == 1 and winograd.is_faster(x, x.shape[1], weight.shape[0]):
        result: Tensor = winograd.winograd(x, weight, bias)
        return result
    return F.conv2d(x, weight, bias, stride, 1)


@convolution.register_fake
def _empty_result(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    height, width = ((size - 1) // stride + 1 for size in x.shape[2:])
    return x.new_empty(x.shape[0], weight.shape[0], height, width).contiguous(memory_format=torch.channels_last)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients with respect to x, weight and bias."""
    x, weight = ctx.saved_tensors
    (outputs, inputs), stride = weight.shape[:2], ctx.stride
    grad = grad.contiguous(memory_format=torch.channels_last)
    dx = dw = db = None
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    if wants_x and stride == 1 and winograd.is_faster(grad, outputs, inputs):
        dx, wants_x = winograd.winograd(grad, weight, None, True), False
    if wants_weight and weight_gradient.is_supported(inputs, outputs):
        dw, wants_weight = weight_gradient.weight_gradient(grad, x, stride), False
    if wants_x or wants_weight:
        mask, pair = [wants_x, wants_weight, False], ([stride] * 2, [1, 1], [1, 1])
        rest = torch.ops.aten.convolution_backward(grad, x, weight, None, *pair, False, [0, 0], 1, mask)
        dx, dw = rest[0] if wants_x else dx, rest[1] if wants_weight else dw
    if wants_bias:
        db = grad.sum((0, 2, 3))
    return dx, dw, db, None


convolution.register_autograd(_gradients, setup_context=_save)


def replace_convolutions(graph: fx.Graph) -> None:
    """Replace convolutions in a graph as torch.compile gives it to its backend, in place."""
    for node in graph.find_nodes(op="call_function", target=torch.conv2d):
        arguments = _ARGUMENTS | dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        stride = _pair(arguments["stride"])
        if _fits(node, arguments) and stride in ((1, 1), (2, 2)):
            operator = torch.ops.featureflock.convolution.default
            inputs = arguments["input"], arguments["weight"], arguments["bias"]
            with graph.inserting_before(node):
                new = graph.call_function(operator, (*inputs, stride[0]))
            new.meta = node.meta
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value, value)


def _fits(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Return whether our kernels support a convolution, and are faster."""
    nodes = [node, *(n for n in (arguments["input"], arguments["weight"], arguments["bias"]) if n is not None)]
    values = [n.meta.get("example_value") for n in nodes if isinstance(n, fx.Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(nodes) or any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return False
    if _pair(arguments["padding"]) != (1, 1) or _pair(arguments["dilation"]) != (1, 1) or arguments["groups"] != 1:
        return False
    _, x, weight = tensors[:3]
    if x.ndim != 4 or tuple(weight.shape[2:]) != (3, 3) or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    (outputs, inputs), training = weight.shape[:2], weight.requires_grad and torch.is_grad_enabled()
    forward = _pair(arguments["stride"]) == (1, 1) and winograd.is_faster(x, inputs, outputs)
    return forward or (training and weight_gradient.is_supported(inputs, outputs))
