"""3×3 convolutions with fewer multiplications, for prediction on processors with AVX2.

Winograd's form takes 16 multiplications where the sum that defines a convolution takes 36, and there PyTorch's library
(oneDNN) computes the sum. winograd.c has the equation, and how. It rounds a little differently: it is for prediction,
and training keeps PyTorch's.

`faster_convolutions` puts it into the graphs that torch.compile makes: networks stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from featureflock.native.building import call, compiled

_INPUTS, _OUTPUTS = 8, 16
"""Numbers of channels must be multiples of these."""

_ENOUGH_TILES, _ENOUGH_CHANNELS = 512, 1024
"""From so many tiles on transforming the weights pays for itself, and from so many pairs of channels on the images."""

_G = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]]


@torch.library.custom_op("featureflock::winograd", mutates_args=())
def winograd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, O, H, W) from x (B, C, H, W), a weight (O, C, 3, 3) and a bias (O); float32 on a CPU.

    Each thread takes some tiles, so the number of threads does not change a bit.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.contiguous()
    (batch, inputs, height, width), outputs = x.shape, weight.shape[0]
    u = _transformed(weight)
    y: Tensor = _like(x, weight, bias)
    pointers = x.data_ptr(), u.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    call(_function(), *pointers, batch, height, width, inputs, outputs)
    return y


@winograd.register_fake
def _like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    batch, _, height, width = x.shape
    sizes = batch, weight.shape[0], height, width
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _transformed(weight: Tensor) -> Tensor:
    """G w Gᵀ, as winograd.c wants it: (O / 16, 16 points, C, 16)."""
    g = weight.new_tensor(_G)
    outputs, inputs = weight.shape[:2]
    panels = weight.reshape(outputs // _OUTPUTS, _OUTPUTS, inputs, 9).permute(0, 3, 2, 1)
    return torch.kron(g, g) @ panels.reshape(-1, 9, inputs * _OUTPUTS)


def _tiles(x: Tensor) -> int:
    """Of 2×2 pixels; where sizes are not fixed, of the example that a graph is made from."""
    batch, _, height, width = (n if isinstance(n, int) else n.node.hint or 0 for n in x.shape)
    return int(batch * ((height + 1) // 2) * ((width + 1) // 2))


class _FasterConvolutions(CustomGraphPass):
    """Turns 3×3 convolutions in a graph into `winograd`, unless their gradients will be asked for."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
            if _fits(*node.args):
                node.target, node.args = torch.ops.featureflock.winograd.default, node.args[:3]

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


faster_convolutions = _FasterConvolutions()
"""Pass it to torch.compile as options={"post_grad_custom_pre_pass": …}."""


def _fits(*args: Any) -> bool:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if transposed or groups != 1 or [*stride, *padding, *dilation] != [1] * 6 or _is_kept(weight):
        return False
    tensors = [node.meta["val"] for node in (x, weight, bias) if node is not None]
    outputs, inputs, *kernel = tensors[1].shape
    return (
        kernel == [3, 3]
        and inputs % _INPUTS == 0
        and outputs % _OUTPUTS == 0
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and tensors[0].is_contiguous(memory_format=torch.channels_last)
        and _tiles(tensors[0]) >= _ENOUGH_TILES
        and inputs * outputs >= _ENOUGH_CHANNELS
    )


def _is_kept(weight: fx.Node) -> bool:
    """Whether a graph returns a weight, as it does when there will be a backward pass."""
    return any(user.op == "output" for user in weight.users)


def _function() -> Any:
    return compiled("winograd", pointers=4, numbers=6)
