"""The gradient of a 3×3 convolution with respect to its weights, on processors with AVX2.

There PyTorch's library (oneDNN) computes convolutions and their gradients with respect to the input near the peak of
the machine, but those with respect to the weights at half of it. weight_gradient.c has the equation, and how.

`faster_weight_gradients` puts it into the graphs that torch.compile makes: networks stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from featureflock.native.building import call, compiled

_INPUTS, _OUTPUTS = 8, 4
"""Numbers of channels must be multiples of these."""


@torch.library.custom_op("featureflock::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    """(O, C, 3, 3) from the gradient (B, O, …) of what a convolution of x (B, C, H, W) gives; float32 on a CPU.

    Stride 1 or 2, padding 1. Each thread takes some output channels, so the number of threads does not change a bit.
    """
    grad, x = (t.contiguous(memory_format=torch.channels_last) for t in (grad, x))
    (batch, inputs, height, width), outputs = x.shape, grad.shape[1]
    dw: Tensor = _like(grad, x, stride)
    sizes = batch, height, width, inputs, outputs, stride
    call(_function(), x.data_ptr(), grad.data_ptr(), dw.data_ptr(), *sizes)
    return dw


@weight_gradient.register_fake
def _like(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    return x.new_empty(grad.shape[1], x.shape[1], 3, 3).contiguous(memory_format=torch.channels_last)


def is_worthwhile() -> bool:
    """Whether this processor is one that gains, and there is a compiler."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and _function() is not None


class _FasterWeightGradients(CustomGraphPass):
    """Turns the gradients of 3×3 convolutions in a graph into `weight_gradient`, and leaves the rest to PyTorch."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
            if _fits(*node.args):
                _replace(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


faster_weight_gradients = _FasterWeightGradients()
"""Pass it to torch.compile as options={"post_grad_custom_pre_pass": …}."""


def _fits(*args: Any) -> bool:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, (_, wanted, bias) = args
    if transposed or groups != 1 or bias or not wanted or [*padding, *dilation] != [1] * 4:
        return False
    tensors = [node.meta["val"] for node in (grad, x, weight)]
    outputs, inputs, *kernel = tensors[2].shape
    return (
        kernel == [3, 3]
        and list(stride) in ([1, 1], [2, 2])
        and inputs % _INPUTS == 0
        and outputs % _OUTPUTS == 0
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors[:2])
    )


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    target = torch.ops.featureflock.weight_gradient.default
    for user in list(node.users):
        if user.args[1] == 1:
            with graph.inserting_before(user):
                ours = graph.call_function(target, (*node.args[:2], node.args[4][0]))  # type: ignore[index]
            ours.meta.update(user.meta)
            user.replace_all_uses_with(ours)
            graph.erase_node(user)
    if node.users:
        node.args = (*node.args[:-1], [True, False, False])
    else:
        graph.erase_node(node)


def _function() -> Any:
    return compiled("weight_gradient", pointers=3, numbers=7)
