"""What a recipe holds instead of a network: a frozen dataclass of its sizes, which makes a fresh one for any data.

So a recipe can be printed, compared and changed from the command line, and the shape of the data is said only once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from featureflock.models.fast_cnn import FastCNN, check_fast
from featureflock.models.layers import check_positive, initialise
from featureflock.models.resnet import CifarResNet, Depth, ResNet, Stem, check_cifar_resnet, check_resnet
from featureflock.models.small import CNN, MLP, check_perceptron
from featureflock.models.wide_resnet import WideResNet, check_wide_resnet


class ModelConfig(ABC):
    """An architecture of your own says how to make an extractor of features."""

    sample: ClassVar[int] = 0
    """How many training inputs `fit` is to see."""

    @abstractmethod
    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        """A freshly initialised extractor for inputs of this shape, (C, H, W) without the batch.

        It takes a batch of inputs to features (B, H), and has their number H as its attribute `feature_dim`.
        """

    def fit(self, extractor: nn.Module, x: Tensor) -> None:  # noqa: B027
        """Set what a fresh extractor takes from the data, if anything, by `sample` training inputs (or all, if fewer).

        They are not augmented, and the same for all members.
        """

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        """A freshly initialised classifier of that extractor's features."""
        features = getattr(extractor, "feature_dim", None)
        if not isinstance(features, int):
            raise ValueError(
                f"{type(extractor).__name__} has no feature_dim, the number of its features; give it one, or a head."
            )
        return linear_head(features, classes)


def linear_head(features: int, classes: int) -> nn.Linear:
    """The classifier behind an extractor: bias 0, weights of std √(2 / features), as in layers.py.

    Features behind a ReLU give logits with the second moment of a pre-activation.
    """
    check_positive("features", features)
    check_positive("classes", classes)
    head = nn.Linear(features, classes)
    initialise(head)
    return head


@dataclass(frozen=True)
class WideResNetConfig(ModelConfig):
    """Wide residual network for 32×32 images."""

    depth: int = 16
    """Number of layers, 6b + 4: 16, 28, 40, …"""
    width: int = 4
    """Widening factor k; the features are 64 k."""
    dropout: float = 0.0
    """Probability of a dropped activation between the two convolutions of a block."""

    def __post_init__(self) -> None:
        check_wide_resnet(self.depth, self.width, self.dropout)

    def extractor(self, shape: tuple[int, ...]) -> WideResNet:
        return WideResNet(self.depth, self.width, _channels(shape), self.dropout)


@dataclass(frozen=True)
class CifarResNetConfig(ModelConfig):
    """Residual network for 32×32 images, with shortcuts that have no parameters; the features are 64."""

    depth: int = 32
    """Number of layers, 6b + 2: 20, 32, 44, …"""

    def __post_init__(self) -> None:
        check_cifar_resnet(self.depth)

    def extractor(self, shape: tuple[int, ...]) -> CifarResNet:
        return CifarResNet(self.depth, _channels(shape))


@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """Residual network for large images; the features are 512, or 2048 from depth 50 on."""

    depth: Depth = 50
    """Number of layers; from 50 on in bottlenecks."""
    stem: Stem = "imagenet"
    """First layers: for 224×224 (7×7 with stride 2, max-pooling), or for 32×32 (3×3 with stride 1)."""

    def __post_init__(self) -> None:
        check_resnet(self.depth, self.stem)

    def extractor(self, shape: tuple[int, ...]) -> ResNet:
        return ResNet(self.depth, self.stem, _channels(shape))


@dataclass(frozen=True)
class MLPConfig(ModelConfig):
    """Multi-layer perceptron on the flattened input; the features are its last layer."""

    widths: tuple[int, ...] = (128, 64, 32)
    """Widths of the layers; a ReLU is behind each."""

    def __post_init__(self) -> None:
        check_perceptron(self.widths)

    def extractor(self, shape: tuple[int, ...]) -> MLP:
        return MLP(math.prod(shape), self.widths)


@dataclass(frozen=True)
class CNNConfig(ModelConfig):
    """Small convolutional net with BatchNorm for digits; the features are 4 times the width."""

    width: int = 32
    """Channels of the first of the three layers; the next have twice and four times as many."""

    def __post_init__(self) -> None:
        check_positive("width", self.width)

    def extractor(self, shape: tuple[int, ...]) -> CNN:
        return CNN(_channels(shape), self.width)


@dataclass(frozen=True)
class FastCNNConfig(ModelConfig):
    """Convolutional network on whitened patches that learns small photographs in few epochs."""

    sample = 1000

    widths: tuple[int, ...] = (32, 64, 128)
    """Channels of the stages, each at half the size of the one before; the features are the last."""

    def __post_init__(self) -> None:
        check_fast(self.widths)

    def extractor(self, shape: tuple[int, ...]) -> FastCNN:
        return FastCNN(self.widths, _channels(shape))

    def fit(self, extractor: nn.Module, x: Tensor) -> None:
        if isinstance(extractor, FastCNN):
            extractor.fit(x)


@dataclass(frozen=True)
class CustomModelConfig(ModelConfig):
    """Modules of your own, by what makes one of each."""

    make_extractor: Callable[[], nn.Module]
    """Makes an extractor."""
    make_head: Callable[[], nn.Module] | None = None
    """Makes a head; by default a linear one for the `feature_dim` of the extractor."""

    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        return self.make_extractor()

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        return super().head(extractor, classes) if self.make_head is None else self.make_head()


def _channels(shape: tuple[int, ...]) -> int:
    if len(shape) != 3:
        raise ValueError(f"A convolutional network needs inputs of shape (channels, height, width); got {shape}.")
    return shape[0]
