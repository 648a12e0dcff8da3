"""Residual networks for CIFAR. He et al. (2016), "Deep Residual Learning for Image Recognition", section 4.2.

Three groups of b basic blocks with 16, 32 and 64 channels at full, half and quarter resolution. Where the shape
changes, the shortcut subsamples and pads with zero channels (the paper's option A), so it has no parameters.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import check_depth, conv, global_average, initialise
from featureflock.models.resnet import BasicBlock


class CifarResNet(nn.Module):
    """Maps images (B, channels, H, W), usually 32×32, to non-negative features (B, 64).

    It has `depth` = 6b + 2 layers, such as 20, 32 or 44, counting the classifier.
    """

    def __init__(self, depth: int, channels: int = 3) -> None:
        super().__init__()
        _check(depth)
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
        return global_average(self.blocks(self.stem(x)))


class Subsampling(nn.Module):
    """Shortcut without parameters: every `stride`-th pixel, and zeros in the additional channels."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels, self.stride = extra_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


@MODELS.register("cifar-resnet")
@dataclass(frozen=True)
class CifarResNetConfig(ModelConfig):
    """Residual network for 32×32 images with parameter-free shortcuts; it has 64 features."""

    depth: int = 32
    """Number of layers, 6b + 2: 20, 32, 44, …"""

    def __post_init__(self) -> None:
        _check(self.depth)

    def extractor(self, shape: tuple[int, ...]) -> CifarResNet:
        return CifarResNet(self.depth, image_channels(shape))


def _check(depth: int) -> None:
    if not isinstance(depth, int) or depth < 8 or depth % 6 != 2:
        raise ValueError(f"A CIFAR ResNet has 6b + 2 layers; use a depth such as 20, 32, 44 or 56, not {depth!r}.")
    check_depth(depth)
