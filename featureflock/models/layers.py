"""Building blocks shared by the networks, and the initialisation of He et al. (2015).

"Delving Deep into Rectifiers", eq. (10) and (14): a ReLU halves the second moment of its input, so weights of variance
2/n preserve that of the pre-activations. n is the number of terms of a sum in the forward pass (fan_in) or in the
backward pass (fan_out):

    convolution   std = √(2 / (k·k·C_out))     fan_out, as in the reference implementations of both kinds of ResNet
    linear        std = √(2 / C_in)            fan_in; bias 0
    BatchNorm     weight 1, bias 0
"""

from torch import Tensor, nn

MAX_SIZE, MAX_DEPTH = 10**6, 2000
"""Largest number of channels or features, and of layers."""


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Convolution with "same" padding at stride 1. It has no bias, because BatchNorm would remove it."""
    if inputs < 1:
        raise ValueError(f"channels must be at least 1; got {inputs}.")
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def global_average(maps: Tensor) -> Tensor:
    """Global average pooling, (B, C, H, W) -> (B, C)."""
    return maps.mean((-2, -1))


def initialise(module: nn.Module) -> None:
    """Initialise all weights of a module in place, with PyTorch's global random generator."""
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, mode="fan_in", nonlinearity="relu")
            nn.init.zeros_(m.bias)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


def check_depth(depth: int) -> None:
    """Raise ValueError if a network would have too many layers to be built."""
    if depth > MAX_DEPTH:
        raise ValueError(f"depth must be at most {MAX_DEPTH:,} layers; got {depth:,}.")


def check_positive(name: str, *sizes: int) -> None:
    """Raise ValueError unless all sizes are integers of at least 1 that a network can have, and there is one."""
    if not sizes:
        raise ValueError(f"{name} must contain at least one number.")
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {size!r}.")
        if size > MAX_SIZE:
            raise ValueError(f"{name} must be at most {MAX_SIZE:,}; got {size:,}.")
