"""Replace 3×3 convolutions in the graphs of torch.compile with our kernels; networks need no change.

Convolutions and their gradients with respect to the input become `winograd`, gradients with respect to the weights
become `weight_gradient`. This applies to float32, channels_last and padding 1 on a CPU, where the kernels are faster.
"""

from typing import Any

import torch
from torch import fx

from featureflock.cpu_kernels import weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import load_kernel

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def compile_options() -> dict[str, Any]:
    """Return options for `module.compile(options=…)` that use our kernels; {} if unsupported or not faster."""
    kernels = weight_gradient.KERNEL, winograd.KERNEL
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or any(load_kernel(*kernel) is None for kernel in kernels):
        return {}
    try:
        from featureflock.cpu_kernels.inductor_pass import OPTION, ReplaceConvolutions  # a slow import
    except (ImportError, AttributeError):  # another version of PyTorch
        return {}
    return {OPTION: ReplaceConvolutions()}


def replace_convolutions(graph: fx.Graph) -> None:
    """Replace convolutions and their gradients in a graph of ATen operators, in place."""
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        args: Any = node.args
        x, weight, bias, stride, *rest = args
        outputs, inputs = weight.meta["val"].shape[:2]
        if _fits(x, weight, stride, *rest) and stride[0] == 1 and winograd.is_faster(x.meta["val"], inputs, outputs):
            node.target, node.args = torch.ops.featureflock.winograd.default, (x, weight, bias)
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        _replace_gradients(graph, node)


def _replace_gradients(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    grad, x, weight, _, stride, *rest, output_mask = args
    if output_mask[2] or not (_fits(x, weight, stride, *rest) and _fits(grad, weight, stride, *rest)):
        return
    outputs, inputs = weight.meta["val"].shape[:2]
    replacements: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    if stride[0] == 1 and winograd.is_faster(grad.meta["val"], outputs, inputs):
        replacements[0] = torch.ops.featureflock.winograd.default, (grad, weight, None, True)
    if weight_gradient.is_supported(inputs, outputs):
        replacements[1] = torch.ops.featureflock.weight_gradient.default, (grad, x, stride[0])
    for user in list(node.users):
        position: Any = user.args[1]
        if position in replacements:
            user.target, user.args = replacements[position]
    if remaining := {user.args[1] for user in node.users}:
        node.args = (*args[:-1], [0 in remaining, 1 in remaining, False])
    else:
        graph.erase_node(node)


def _fits(x: fx.Node, weight: fx.Node, stride: Any, *rest: Any) -> bool:
    """Return whether the kernels support this kind of convolution."""
    padding, dilation, transposed, _, groups = rest
    tensors = [node.meta["val"] for node in (x, weight)]
    return (
        not transposed
        and groups == 1
        and [*padding, *dilation] == [1] * 4
        and list(stride) in ([1, 1], [2, 2])
        and list(tensors[1].shape[2:]) == [3, 3]
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and tensors[0].is_contiguous(memory_format=torch.channels_last)
    )
