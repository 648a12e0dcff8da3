"""Our kernels in the graphs that torch.compile makes: networks stay as they are.

A convolution and its gradients with respect to the input become `winograd`, those with respect to the weights
`weight_gradient`, if they are 3×3 with padding 1, float32, channels_last and on a CPU, and the kernels gain. All others
stay with PyTorch.
"""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from featureflock.cpu_kernels import weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import compiled

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def is_worthwhile() -> bool:
    """Whether this processor is one that gains, and there is a compiler."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and all(
        compiled(*kernel) is not None for kernel in (weight_gradient.KERNEL, winograd.KERNEL)
    )


class _FasterConvolutions(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
            args: Any = node.args
            x, weight, bias, stride, *rest = args
            outputs, inputs = weight.meta["val"].shape[:2]
            if _fits(x, weight, stride, *rest) and stride[0] == 1 and winograd.gains(x.meta["val"], inputs, outputs):
                node.target, node.args = torch.ops.featureflock.winograd.default, (x, weight, bias)
        for node in graph.find_nodes(op="call_function", target=_BACKWARD):
            _replace_gradients(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, winograd.__file__, weight_gradient.__file__))


faster_convolutions = _FasterConvolutions()
"""Pass it to torch.compile as options={"post_grad_custom_pre_pass": …}."""


def _replace_gradients(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    grad, x, weight, _, stride, *rest, wanted = args
    if wanted[2] or not (_fits(x, weight, stride, *rest) and _fits(grad, weight, stride, *rest)):
        return
    outputs, inputs = weight.meta["val"].shape[:2]
    ours: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    if stride[0] == 1 and winograd.gains(grad.meta["val"], outputs, inputs):
        ours[0] = torch.ops.featureflock.winograd.default, (grad, weight, None, True)
    if weight_gradient.gains(inputs, outputs):
        ours[1] = torch.ops.featureflock.weight_gradient.default, (grad, x, stride[0])
    for user in list(node.users):
        which: Any = user.args[1]
        if which in ours:
            with graph.inserting_before(user):
                replacement = graph.call_function(*ours[which])
            replacement.meta.update(user.meta)
            user.replace_all_uses_with(replacement)
            graph.erase_node(user)
    left = {user.args[1] for user in node.users}
    if left:
        node.args = (*args[:-1], [0 in left, 1 in left, False])
    else:
        graph.erase_node(node)


def _fits(
    x: fx.Node, weight: fx.Node, stride: Any, padding: Any, dilation: Any, transposed: Any, _: Any, groups: Any
) -> bool:
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
