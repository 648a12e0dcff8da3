"""Gradient of a 3×3 convolution with respect to its weights, for processors with AVX2 or AVX-512.

oneDNN, PyTorch's library, computes convolutions and their gradients with respect to the input near peak performance.
With AVX2, it computes gradients with respect to the weights at half of it, with AVX-512 at three quarters. See
weight_gradient.c for the algorithm.
"""

import torch
from torch import Tensor

from featureflock.cpu_kernels.compile_c import call_kernel, lanes, load_kernel

KERNEL = ("weight_gradient", 3, 7)
"""Name of the C function, number of pointer arguments, number of integer arguments."""


@torch.library.custom_op("featureflock::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    """Return the gradient (O, C, 3, 3), given the output gradient (B, O, …) and the input x (B, C, H, W).

    For float32 on a CPU, stride 1 or 2, padding 1. Each thread computes some output channels, so the result does not
    depend on the number of threads.
    """
    grad, x = (t.contiguous(memory_format=torch.channels_last) for t in (grad, x))
    (batch, inputs, height, width), outputs = x.shape, grad.shape[1]
    dw: Tensor = _empty_result(grad, x, stride)
    pointers = x.data_ptr(), grad.data_ptr(), dw.data_ptr()
    call_kernel(load_kernel(*KERNEL), *pointers, batch, height, width, inputs, outputs, stride)
    return dw


@weight_gradient.register_fake
def _empty_result(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    return x.new_empty(grad.shape[1], x.shape[1], 3, 3).contiguous(memory_format=torch.channels_last)


def is_supported(inputs: int, outputs: int) -> bool:
    """Return whether the kernel supports these numbers of channels."""
    return inputs % lanes() == 0 and outputs % (lanes() // 2) == 0
