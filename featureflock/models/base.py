"""Base class and registry of model configurations.

A recipe holds a `ModelConfig`, a frozen dataclass of sizes, which builds feature extractors for the shape of the data.

    config = WideResNetConfig(depth=16, width=4)
    extractor = config.extractor((3, 32, 32))        # WideResNet(16, 4)
    head = config.head(extractor, classes=10)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from featureflock.ensemble.sharing import SharedMembers
from featureflock.models.layers import check_positive, initialise
from featureflock.utils.registry import Registry


class ModelConfig(ABC):
    """Base class of model configurations, which are frozen dataclasses."""

    fit_examples: ClassVar[int] = 0
    """Number of training inputs passed to `fit`; 0 if the model is not fitted to data."""

    @abstractmethod
    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        """Build a randomly initialised feature extractor for inputs of this shape, (C, H, W) for images.

        It maps a batch of inputs to features (B, H) and stores H as `feature_dim`.
        """

    def fit(self, extractor: nn.Module, x: Tensor) -> None:  # noqa: B027
        """Initialise data-dependent parts of a new extractor, such as a whitening layer.

        x are `fit_examples` training inputs (all, if there are fewer), not augmented, the same for every member.
        """

    def share(self, extractor: nn.Module, members: int) -> SharedMembers | None:
        """Members in one network, made of an extractor (ensemble/sharing.py); None for separate extractors."""
        return None

    def trunk(self, shape: tuple[int, ...]) -> Callable[[], nn.Module] | None:
        """Function that builds a trunk for inputs of this shape, whose output all extractors get; None for no trunk."""
        return None

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        """Build a randomly initialised classifier for the features of `extractor`."""
        features = getattr(extractor, "feature_dim", None)
        if not isinstance(features, int):
            name = type(extractor).__name__
            raise ValueError(f"{name} has no integer attribute feature_dim, its number of features; add it or a head.")
        return linear_head(features, classes)


MODELS: Registry[type[ModelConfig]] = Registry("model")
"""Model configurations by their command-line name."""


@dataclass(frozen=True)
class CustomModelConfig(ModelConfig):
    """User-defined modules.

        Recipe(model=CustomModelConfig(MyBackbone), ...)

    A recipe cannot be rebuilt from JSON with it. For that, write a `ModelConfig` and register it (CONTRIBUTING.md).
    """

    make_extractor: Callable[[], nn.Module]
    """Returns a new feature extractor."""
    make_head: Callable[[], nn.Module] | None = None
    """Returns a new head; by default a linear layer on the extractor's `feature_dim` features."""

    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        return self.make_extractor()

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        return super().head(extractor, classes) if self.make_head is None else self.make_head()


def linear_head(features: int, classes: int) -> nn.Linear:
    """Linear classifier with bias 0 and weights of standard deviation √(2 / features) (see layers.py)."""
    check_positive("features", features)
    check_positive("classes", classes)
    head = nn.Linear(features, classes)
    initialise(head)
    return head


def image_channels(shape: tuple[int, ...]) -> int:
    """Number of channels of an input shape (channels, height, width)."""
    if len(shape) != 3:
        raise ValueError(f"A convolutional network needs inputs of shape (channels, height, width); got {shape}.")
    return shape[0]
