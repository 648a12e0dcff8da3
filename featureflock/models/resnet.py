"""Residual networks. He et al. (2016), "Deep Residual Learning for Image Recognition", table 1 and section 4.2.

    x ← relu(shortcut(x) + F(x))

    BasicBlock    F = bn₂ conv₂ relu bn₁ conv₁                     two 3×3 convolutions
    Bottleneck    F = bn₃ conv₃ relu bn₂ conv₂ relu bn₁ conv₁      1×1, 3×3 and 1×1

The shortcut is the identity wherever the shape stays. Where it changes, `CifarResNet` takes every other pixel and adds
channels of zeros (the paper's option A, no parameters), and `ResNet` a 1×1 convolution with BatchNorm (option B).
"""

from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.layers import check_positive, conv, initialise, pooled

Depth = Literal[18, 34, 50, 101, 152]
Stem = Literal["imagenet", "cifar"]


class CifarResNet(nn.Module):
    """Images (B, channels, H, W), made for 32×32, to features (B, 64), which are not negative.

    Args:
        depth: 6b + 2 layers, such as 20, 32 or 44, with the classifier that comes behind.
        channels: of the images.
    """

    def __init__(self, depth: int, channels: int = 3) -> None:
        super().__init__()
        check_cifar_resnet(depth)
        check_positive("channels", channels)
        self.stem = nn.Sequential(conv(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        blocks, inputs = [], 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((depth - 2) // 6):
                shortcut = nn.Identity() if i or stride == 1 else Subsampling(outputs - inputs, stride)
                blocks.append(BasicBlock(inputs, outputs, 1 if i else stride, shortcut))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.feature_dim = inputs
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.blocks(self.stem(x)))


class ResNet(nn.Module):
    """Images (B, channels, H, W) to features (B, 512), or (B, 2048) from depth 50 on, which are not negative.

    Args:
        depth: 18 or 34 with basic blocks; 50, 101 or 152 with bottlenecks, which have the stride in their 3×3
            convolution (the usual "v1.5"; the paper had it in the 1×1 before, which skips three pixels in four).
        stem: "imagenet" for images of 224×224, which a 7×7 convolution and max-pooling halve twice before the first
            block; "cifar" for 32×32, which a 3×3 convolution leaves at full size.
        channels: of the images.
    """

    def __init__(self, depth: Depth, stem: Stem = "imagenet", channels: int = 3) -> None:
        super().__init__()
        check_resnet(depth, stem)
        check_positive("channels", channels)
        first = conv(channels, 64, 7, 2) if stem == "imagenet" else conv(channels, 64, 3)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU())
        if stem == "imagenet":
            self.stem.append(nn.MaxPool2d(3, 2, padding=1))
        block, counts = _TABLE_1[depth]
        blocks: list[nn.Module] = []
        inputs = 64
        for width, stride, count in zip((64, 128, 256, 512), (1, 2, 2, 2), counts, strict=True):
            for i in range(count):
                blocks.append(block(inputs, width, 1 if i else stride))
                inputs = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.feature_dim = inputs
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.blocks(self.stem(x)))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + F(x)) with two 3×3 convolutions in F; a shortcut of None is a projection where needed."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _projection(inputs, width, stride) if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + branch)


class Bottleneck(nn.Module):
    """relu(shortcut(x) + F(x)), where F works at a quarter of the channels: 1×1, 3×3 with the stride, 1×1."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.shortcut = _projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.shortcut(x) + self.bn3(self.conv3(inner)))


class Subsampling(nn.Module):
    """The shortcut without parameters: one pixel in each square of stride × stride, and zeros as the new channels."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels, self.stride = extra_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


_TABLE_1: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def check_cifar_resnet(depth: int) -> None:
    """Refuse a network that does not exist."""
    if not isinstance(depth, int) or depth < 8 or depth % 6 != 2:
        raise ValueError(f"A ResNet for CIFAR has 6b + 2 layers; use a depth such as 20, 32, 44 or 56, not {depth!r}.")


def check_resnet(depth: int, stem: str) -> None:
    """Refuse a network that does not exist."""
    if depth not in _TABLE_1:
        known = ", ".join(map(str, _TABLE_1))
        raise ValueError(f"There is no ResNet of depth {depth!r}; use {known}, or CifarResNet for 6b + 2 layers.")
    if stem not in get_args(Stem):
        raise ValueError(f'stem must be "imagenet" or "cifar", for large or for 32×32 images; got {stem!r}.')
