"""Two small networks that train in seconds on a laptop: a perceptron and a convolutional net for digits.

perceptron   h ← relu(W h + b), layer by layer
conv. net    h ← relu(bn(conv(h))) three times, with w, 2w and 4w channels at full, half and quarter size
"""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from featureflock.models.layers import check_positive, conv, initialise, pooled


class MLP(nn.Module):
    """Inputs of any shape (B, …) to features (B, widths[-1]), which are not negative.

    Args:
        inputs: how many numbers one input has, when it is flattened.
        widths: of the layers, one after another. Behind each is a ReLU, also behind the last.
    """

    def __init__(self, inputs: int, widths: Sequence[int] = (128, 64, 32)) -> None:
        super().__init__()
        check_positive("inputs", inputs)
        check_perceptron(widths)
        self.layers = nn.Sequential()
        for fan_in, fan_out in itertools.pairwise((inputs, *widths)):
            self.layers.extend([nn.Linear(fan_in, fan_out), nn.ReLU()])
        self.feature_dim = widths[-1]
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x.flatten(1))
        return features


class CNN(nn.Module):
    """Small images (B, channels, H, W), such as 8×8, 8×16 or 28×28, to features (B, 4·width), which are not negative.

    Args:
        channels: of the images.
        width: w, the channels of the first layer; the second has 2w and the third 4w.
    """

    def __init__(self, channels: int = 1, width: int = 32) -> None:
        super().__init__()
        check_positive("channels", channels)
        check_positive("width", width)
        self.layers = nn.Sequential()
        for inputs, outputs, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            self.layers.extend([conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU()])
        self.feature_dim = 4 * width
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.layers(x))


def check_perceptron(widths: Sequence[int]) -> None:
    """Refuse a network without layers."""
    if not widths:
        raise ValueError("A perceptron needs at least one layer; give widths such as (128, 64, 32).")
    for width in widths:
        check_positive("each of widths", width)
