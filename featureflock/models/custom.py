"""Networks defined by the user."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from featureflock.models.base import ModelConfig


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
