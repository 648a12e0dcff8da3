"""What the networks share: a convolution, global average pooling, and the initial weights of He et al. (2015).

"Delving Deep into Rectifiers", eq. (10) and (14): a ReLU halves the second moment of what it passes on, so weights of
variance 2/n keep that of the pre-activations. n counts the terms of a sum in the forward pass (fan_in) or in the
backward pass (fan_out):

    convolution   std = √(2 / (k·k·C_out))     fan_out, as in the code published with both kinds of ResNet
    linear        std = √(2 / C_in)            fan_in; bias 0
    BatchNorm     weight 1, bias 0
"""

from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size at stride 1. It has no bias, because BatchNorm takes a constant away."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def pooled(maps: Tensor) -> Tensor:
    """Global average pooling, (B, C, H, W) -> (B, C)."""
    return maps.mean((-2, -1))


def initialise(module: nn.Module) -> None:
    """Draw all weights of a module anew, from PyTorch's random numbers, as at the top of this file."""
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, mode="fan_in", nonlinearity="relu")
            nn.init.zeros_(m.bias)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


def check_positive(name: str, size: int) -> None:
    """Refuse a size that is no whole number of at least 1."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {size!r}.")
