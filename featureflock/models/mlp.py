"""Multi-layer perceptron: h ← relu(W h + b), layer by layer."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.models.base import MODELS, ModelConfig
from featureflock.models.layers import check_positive, initialise


class MLP(nn.Module):
    """Maps inputs of any shape (B, …) to non-negative features (B, widths[-1]).

    `inputs` is the size of one flattened input. Every layer, including the last, is followed by a ReLU.
    """

    def __init__(self, inputs: int, widths: Sequence[int] = (128, 64, 32)) -> None:
        super().__init__()
        check_positive("inputs", inputs)
        check_positive("widths", *widths)
        self.layers = nn.Sequential()
        for fan_in, fan_out in itertools.pairwise((inputs, *widths)):
            self.layers.extend([nn.Linear(fan_in, fan_out), nn.ReLU()])
        self.feature_dim = widths[-1]
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x.flatten(1))
        return features


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLPConfig(ModelConfig):
    """Multi-layer perceptron on the flattened input; the last layer gives the features."""

    widths: tuple[int, ...] = (128, 64, 32)
    """Layer widths; each layer is followed by a ReLU."""

    def __post_init__(self) -> None:
        check_positive("widths", *self.widths)

    def extractor(self, shape: tuple[int, ...]) -> MLP:
        return MLP(math.prod(shape), self.widths)
