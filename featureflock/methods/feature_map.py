"""feature-MAP: the feature prior without repulsion, v = g + s.

With one member, this is the ablation of the paper's appendix C; with several, it isolates the effect of the repulsion.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from featureflock.core.layer import ParticleLayer
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import MAP
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method, SearchSpace


@METHODS.register("feature-map")
@dataclass(frozen=True)
class FeatureMAP(Method):
    """A prior on the features before a shared head, without repulsion."""

    title = "feature-MAP"
    default_members = 1
    search_space: ClassVar[SearchSpace] = {"prior.precision": (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)}

    prior: Prior = Cauchy(5e-3)
    """Prior on each feature. The default is the paper's for CIFAR-100, where it reports this ablation."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads[0], ParticleLayer(self.prior, rule=MAP()))
