"""3×3 convolutions with Winograd's algorithm, for processors with AVX2 or AVX-512.

Winograd's F(2×2, 3×3) needs 16 multiplications instead of the 36 of a direct convolution, which oneDNN, PyTorch's
library, uses on these processors. See winograd.c for the algorithm. Results differ by about 1e-6 of the largest output.

The gradient with respect to x is a convolution too: of the gradient of y, with the kernel rotated by 180° and input and
output channels exchanged.
"""

import torch
from torch import Tensor

from featureflock.cpu_kernels.compile_c import call_kernel, lanes, load_kernel

KERNEL = ("winograd", 4, 6)
"""Name of the C function, number of pointer arguments, number of integer arguments."""


@torch.library.custom_op("featureflock::winograd", mutates_args=())
def winograd(x: Tensor, weight: Tensor, bias: Tensor | None = None, backward: bool = False) -> Tensor:
    """Convolve x (B, C, H, W) with a weight (O, C, 3, 3) and add a bias (O); float32 on a CPU, padding 1.

    With `backward`, x is the output gradient (B, O, H, W), and the result is the input gradient (B, C, H, W). Each
    thread computes some tiles, so the result does not depend on the number of threads.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.contiguous()
    weight = weight.transpose(0, 1).flip(2, 3) if backward else weight
    (batch, inputs, height, width), outputs = x.shape, weight.shape[0]
    g = weight.new_tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]])
    panel = 2 * lanes()
    panels = weight.reshape(outputs // panel, panel, inputs, 9).permute(0, 3, 2, 1)
    u = torch.kron(g, g) @ panels.reshape(-1, 9, inputs * panel)  # G w Gᵀ in the layout (O / panel, 16, C, panel)
    y: Tensor = _empty_result(x, weight, bias)
    pointers = x.data_ptr(), u.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    call_kernel(load_kernel(*KERNEL), *pointers, batch, height, width, inputs, outputs)
    return y


@winograd.register_fake
def _empty_result(x: Tensor, weight: Tensor, bias: Tensor | None = None, backward: bool = False) -> Tensor:
    batch, _, height, width = x.shape
    sizes = batch, weight.shape[1 if backward else 0], height, width
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def is_faster(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether the kernel supports these sizes and was measured to be faster.

    With fewer tiles of 2×2 pixels the transform of the weights costs too much; with fewer channels that of the images.
    """
    # For dynamic shapes, the sizes that the graph was traced with: not a public attribute, so 0 without it.
    sizes = (n if isinstance(n, int) else getattr(getattr(n, "node", None), "hint", None) or 0 for n in x.shape)
    batch, _, height, width = sizes
    tiles = batch * ((height + 1) // 2) * ((width + 1) // 2)
    fewest = 4096 if lanes() == 16 else 1024
    return bool(inputs % lanes() == outputs % (2 * lanes()) == 0 and tiles >= 512 and inputs * outputs >= fewest)
