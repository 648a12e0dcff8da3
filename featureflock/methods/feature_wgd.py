"""feature-WGD, the paper's method (Algorithm 1): n extractors, the particle layer, and one shared head."""

from dataclasses import dataclass

from torch import nn

from featureflock.core.priors import Cauchy, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method, TransportSettings


@METHODS.register("feature-wgd")
@dataclass(frozen=True)
class FeatureWGD(TransportSettings, Method):
    """Members repel each other in feature space, before a shared head."""

    title = "feature-WGD"

    prior: Prior = Cauchy(1e-3)
    """Prior on each feature. The paper uses precision 1e-3 for CIFAR-10, 5e-3 for CIFAR-100 and 2e-3 for ImageNet."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads[0], self.layer(len(extractors)))
