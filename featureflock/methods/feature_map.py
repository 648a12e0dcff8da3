"""feature-MAP: the feature prior without repulsion, v = g + s. With one member, the paper's ablation (its appendix C).

With several members it is a shared head without repulsion: the ablation that tells what the repulsion adds.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from featureflock.core.layer import ParticleLayer
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import MAP
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import Method, mean_cross_entropy


@dataclass(frozen=True)
class FeatureMAP(Method):
    """The prior on the features before a shared head, and nothing else."""

    title = "feature-MAP"

    default_members: ClassVar[int] = 1

    prior: Prior = Cauchy(5e-3)
    """Prior on each feature; the paper's for CIFAR-100, on which it has this ablation."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads[0], ParticleLayer(self.prior, rule=MAP()))

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(ens, x, y)
