"""Residual networks. He et al. (2016), "Deep Residual Learning for Image Recognition", table 1.

    x ← relu(shortcut(x) + F(x))

    BasicBlock    F = bn₂ conv₂ relu bn₁ conv₁                     two 3×3 convolutions
    Bottleneck    F = bn₃ conv₃ relu bn₂ conv₂ relu bn₁ conv₁      1×1, 3×3 and 1×1

The shortcut is the identity where the shape is unchanged, and otherwise a 1×1 convolution with BatchNorm (the paper's
option B). The networks for CIFAR are in cifar_resnet.py.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import conv, global_average, initialise

Depth = Literal[18, 34, 50, 101, 152]
Stem = Literal["imagenet", "cifar"]


class ResNet(nn.Module):
    """Maps images (B, channels, H, W) to non-negative features: (B, 512), or (B, 2048) for depth 50 and above.

    Args:
        depth: 18 or 34 with basic blocks; 50, 101 or 152 with bottlenecks. Bottlenecks have the stride in their 3×3
            convolution (the usual "v1.5"; the paper has it in the first 1×1, which ignores three pixels in four).
        stem: "imagenet" for images of 224×224: a 7×7 convolution with stride 2, then max-pooling; "cifar" for 32×32:
            a 3×3 convolution with stride 1.
        channels: image channels.
    """

    def __init__(self, depth: Depth, stem: Stem = "imagenet", channels: int = 3) -> None:
        super().__init__()
        _check(depth, stem)
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
        return global_average(self.blocks(self.stem(x)))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + F(x)), where F has two 3×3 convolutions. The default shortcut projects if needed."""

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
    """relu(shortcut(x) + F(x)), where F reduces the channels by four: 1×1, 3×3 with the stride, 1×1."""

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


@MODELS.register("resnet")
@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """Residual network for large images; it has 512 features, or 2048 for depth 50 and above."""

    depth: Depth = 50
    """Number of layers; networks of 50 layers or more use bottleneck blocks."""
    stem: Stem = "imagenet"
    """First layers: for 224×224 images (7×7 with stride 2, max-pooling), or for 32×32 (3×3 with stride 1)."""

    def __post_init__(self) -> None:
        _check(self.depth, self.stem)

    def extractor(self, shape: tuple[int, ...]) -> ResNet:
        return ResNet(self.depth, self.stem, image_channels(shape))


def _check(depth: int, stem: str) -> None:
    if depth not in _TABLE_1:
        known = ", ".join(map(str, _TABLE_1))
        raise ValueError(f"There is no ResNet of depth {depth!r}; use {known}, or CifarResNet for 6b + 2 layers.")
    if stem not in get_args(Stem):
        raise ValueError(f'stem must be "imagenet" (large images) or "cifar" (32×32 images); got {stem!r}.')
