"""Wide residual networks. Zagoruyko & Komodakis (2016), "Wide Residual Networks", table 1.

WRN-d-k has d = 6b + 4 convolutional layers: one with 16 channels, then three groups of b blocks with 16k, 32k and 64k
channels at full, half and quarter resolution. A block applies BatchNorm and ReLU before each convolution (He et al.
2016, "Identity Mappings"), so the residual stream x is never rectified:

    a = relu(bn₁(x)),    x ← x + conv₂(dropout(relu(bn₂(conv₁(a)))))

Where the shape changes, a 1×1 convolution of a replaces x in the sum.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import check_depth, check_positive, conv, global_average, initialise


class WideResNet(nn.Module):
    """Maps images (B, channels, H, W) to non-negative features (B, 64·width).

    Args:
        depth: 6b + 4 layers, such as 16, 28 or 40.
        width: k, the widening factor.
        channels: image channels.
        dropout: dropout probability between the two convolutions of a block.
    """

    def __init__(self, depth: int, width: int, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        _check(depth, width, dropout)
        self.conv = conv(channels, 16, 3)
        blocks, inputs = [], 16
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range((depth - 4) // 6):
                blocks.append(PreactivationBlock(inputs, outputs, 1 if i else stride, dropout))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(inputs)
        self.feature_dim = inputs
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return global_average(F.relu(self.bn(self.blocks(self.conv(x)))))


class PreactivationBlock(nn.Module):
    """One block: the equation at the top of this file."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv(outputs, outputs, 3)
        self.shortcut = None if inputs == outputs and stride == 1 else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.bn1(x))
        branch: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(a)))))
        return branch + (x if self.shortcut is None else self.shortcut(a))


@MODELS.register("wide-resnet")
@dataclass(frozen=True)
class WideResNetConfig(ModelConfig):
    """Wide residual network for 32×32 images; it has 64·width features."""

    depth: int = 16
    """Number of layers, 6b + 4: 16, 28, 40, …"""
    width: int = 4
    """Widening factor k."""
    dropout: float = 0.0
    """Dropout probability between the two convolutions of a block."""

    def __post_init__(self) -> None:
        _check(self.depth, self.width, self.dropout)

    def extractor(self, shape: tuple[int, ...]) -> WideResNet:
        return WideResNet(self.depth, self.width, image_channels(shape), self.dropout)


def _check(depth: int, width: int, dropout: float) -> None:
    if not isinstance(depth, int) or depth < 10 or depth % 6 != 4:
        raise ValueError(f"A wide ResNet has 6b + 4 layers; use a depth such as 10, 16, 22, 28 or 40, not {depth!r}.")
    check_depth(depth)
    check_positive("width", width)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout!r}.")
