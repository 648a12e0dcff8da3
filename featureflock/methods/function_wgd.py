"""function-WGD (Wang et al., 2019, with the paper's update): members repel each other in the space of their logits.

Every member has a head of its own, and the particle layer sits behind the heads.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.core.priors import Cauchy, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import Method, TransportSettings, mean_cross_entropy


@dataclass(frozen=True)
class FunctionWGD(TransportSettings, Method):
    """Particles are the logits of members that share nothing."""

    title = "function-WGD"

    prior: Prior = Cauchy(1e-6)
    """Prior on each logit; the paper's for CIFAR."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads, self.layer(len(extractors)), at="logits")

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(ens, x, y)
