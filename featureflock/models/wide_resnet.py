"""Wide residual networks. Zagoruyko & Komodakis (2016), "Wide Residual Networks", table 1.

WRN-d-k has d = 6b + 4 layers of convolution: one of 16 channels, then three groups of b blocks with 16k, 32k and 64k
channels at full, half and quarter size. A block normalises and activates before it convolves (He et al. 2016, "Identity
Mappings"), so that the stream x runs from block to block untouched:

    a = relu(bn₁(x)),    x ← x + conv₂(dropout(relu(bn₂(conv₁(a)))))

and where the shape changes, a 1×1 convolution of a takes the place of x in the sum.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.layers import check_positive, conv, initialise, pooled


class WideResNet(nn.Module):
    """Images (B, channels, H, W) to features (B, 64·width), which are not negative.

    Args:
        depth: 6b + 4 layers, such as 16, 28 or 40.
        width: k, the widening factor.
        channels: of the images.
        dropout: probability of a dropped activation between the two convolutions of a block.
    """

    def __init__(self, depth: int, width: int, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        check_wide_resnet(depth, width, dropout)
        check_positive("channels", channels)
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
        return pooled(F.relu(self.bn(self.blocks(self.conv(x)))))


class PreactivationBlock(nn.Module):
    """One block of a wide residual network: the equation at the top of this file."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.bn1(x))
        branch: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(a)))))
        return branch + (x if self.shortcut is None else self.shortcut(a))


def check_wide_resnet(depth: int, width: int, dropout: float) -> None:
    """Refuse a network that does not exist."""
    if not isinstance(depth, int) or depth < 10 or depth % 6 != 4:
        raise ValueError(f"A wide ResNet has 6b + 4 layers; use a depth such as 10, 16, 22, 28 or 40, not {depth!r}.")
    check_positive("width", width)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability; use 0 or more and less than 1, not {dropout!r}.")
