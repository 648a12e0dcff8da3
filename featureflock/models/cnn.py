"""Small convolutional network for digits: h ← relu(bn(conv(h))) with w, 2w and 4w channels, each at half the size."""

from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import check_positive, conv, global_average, initialise


class CNN(nn.Module):
    """Maps small images (B, channels, H, W), such as 8×8 or 28×28, to non-negative features (B, 4·width)."""

    def __init__(self, channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs, outputs, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            self.layers.extend([conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU()])
        self.feature_dim = 4 * width
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return global_average(self.layers(x))


@MODELS.register("cnn")
@dataclass(frozen=True)
class CNNConfig(ModelConfig):
    """Small convolutional network with BatchNorm for digits; it has 4·width features."""

    width: int = 32
    """Channels of the first of three layers; the second has twice and the third four times as many."""

    def __post_init__(self) -> None:
        check_positive("width", self.width)

    def extractor(self, shape: tuple[int, ...]) -> CNN:
        return CNN(image_channels(shape), self.width)
