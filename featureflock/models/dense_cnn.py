"""Small fully convolutional network for segmentation: h ← relu(bn(conv(h))) at full size, with growing dilation."""

from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig, image_channels
from featureflock.models.layers import check_positive, initialise


class DenseCNN(nn.Module):
    """Maps images (B, channels, H, W) to features of each pixel, (B, width, H, W).

    Four 3 × 3 convolutions with dilations 1, 2, 4 and 1 see 17 × 17 pixels.
    """

    def __init__(self, channels: int = 1, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs, dilation in ((channels, 1), (width, 2), (width, 4), (width, 1)):
            layer = nn.Conv2d(inputs, width, 3, padding=dilation, dilation=dilation, bias=False)
            self.layers.extend([layer, nn.BatchNorm2d(width), nn.ReLU()])
        self.feature_dim = width
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


@MODELS.register("dense-cnn")
@dataclass(frozen=True)
class DenseCNNConfig(ModelConfig):
    """Fully convolutional network for one class per pixel; the head is a 1 × 1 convolution."""

    width: int = 24
    """Channels of each layer, and features of each pixel."""

    def __post_init__(self) -> None:
        check_positive("width", self.width)

    def extractor(self, shape: tuple[int, ...]) -> DenseCNN:
        return DenseCNN(image_channels(shape), self.width)

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        head = nn.Conv2d(self.width, classes, 1)
        initialise(head)
        nn.init.zeros_(head.bias)  # type: ignore[arg-type]
        return head
