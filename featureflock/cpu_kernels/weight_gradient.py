"""The gradient of a 3×3 convolution with respect to its weights, on processors with AVX2.

There PyTorch's library (oneDNN) computes convolutions and their gradients with respect to the input near the peak of
the machine, but those with respect to the weights at half of it. weight_gradient.c has the equation, and how.
"""

import torch
from torch import Tensor

from featureflock.cpu_kernels.compile_c import call, compiled

KERNEL = ("weight_gradient", 3, 7)
"""The C function, its pointers and its numbers."""

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
    call(compiled(*KERNEL), x.data_ptr(), grad.data_ptr(), dw.data_ptr(), *sizes)
    return dw


@weight_gradient.register_fake
def _like(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    return x.new_empty(grad.shape[1], x.shape[1], 3, 3).contiguous(memory_format=torch.channels_last)


def gains(inputs: int, outputs: int) -> bool:
    """Whether it can be used."""
    return inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0
