"""A single network trained by maximum likelihood, the paper's baseline: loss = CE."""

from dataclasses import dataclass

from torch import nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method


@METHODS.register("single")
@dataclass(frozen=True)
class Single(Method):
    """A single network trained by maximum likelihood."""

    title = "Single"
    default_members = 1

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        if len(extractors) != 1:
            raise ValueError(f"Single trains one network, got members={len(extractors)}; use DeepEnsembles instead.")
        return super().assemble(extractors, heads, train_size)
