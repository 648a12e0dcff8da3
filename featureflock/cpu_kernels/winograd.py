"""3×3 convolutions with fewer multiplications, on processors with AVX2.

Winograd's form takes 16 multiplications where the sum that defines a convolution takes 36, and there PyTorch's library
(oneDNN) computes the sum. winograd.c has the equation, and how. It rounds a little differently, to about 1e-6 of the
largest output.

The gradient with respect to x is a convolution too: of the gradient of y, with the kernel turned half around and inputs
and outputs exchanged.
"""

import torch
from torch import Tensor

from featureflock.cpu_kernels.compile_c import call, compiled

KERNEL = ("winograd", 4, 6)
"""The C function, its pointers and its numbers."""

_INPUTS, _OUTPUTS = 8, 16
"""Numbers of channels must be multiples of these."""

_ENOUGH_TILES, _ENOUGH_CHANNELS = 512, 1024
"""From so many tiles on transforming the weights pays for itself, and from so many pairs of channels on the images."""

_G = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]]


@torch.library.custom_op("featureflock::winograd", mutates_args=())
def winograd(x: Tensor, weight: Tensor, bias: Tensor | None = None, backward: bool = False) -> Tensor:
    """(B, O, H, W) from x (B, C, H, W), a weight (O, C, 3, 3) and a bias (O); float32 on a CPU.

    With `backward`, the gradient (B, C, H, W) with respect to x from that with respect to the result, (B, O, H, W).
    Each thread takes some tiles, so the number of threads does not change a bit.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.contiguous()
    weight = weight.transpose(0, 1).flip(2, 3) if backward else weight
    (batch, inputs, height, width), outputs = x.shape, weight.shape[0]
    u = _transformed(weight)
    y: Tensor = _like(x, weight, bias)
    pointers = x.data_ptr(), u.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    call(compiled(*KERNEL), *pointers, batch, height, width, inputs, outputs)
    return y


@winograd.register_fake
def _like(x: Tensor, weight: Tensor, bias: Tensor | None = None, backward: bool = False) -> Tensor:
    batch, _, height, width = x.shape
    sizes = batch, weight.shape[1 if backward else 0], height, width
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


def gains(x: Tensor, inputs: int, outputs: int) -> bool:
    """Whether it can be used, and was measured to be faster."""
    return (
        inputs % _INPUTS == 0
        and outputs % _OUTPUTS == 0
        and _tiles(x) >= _ENOUGH_TILES
        and inputs * outputs >= _ENOUGH_CHANNELS
    )
