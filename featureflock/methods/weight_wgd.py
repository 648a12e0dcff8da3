"""weight-WGD (D'Angelo and Fortuin, 2021, with the paper's update): members repel each other in the space of weights.

The particles are all trained weights of each member, own head included. The data gradient is that of the whole data set
of N points, estimated by N/B times the mini-batch's, and the update is v/N: prior and repulsion enter it with 1/N.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.core.priors import Normal, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import Method, TransportSettings, mean_cross_entropy


@dataclass(frozen=True)
class WeightWGD(TransportSettings, Method):
    """Particles are the weights of members that share nothing."""

    title = "weight-WGD"

    prior: Prior = Normal(1e-3)
    """Prior on each weight, beside any weight decay of the optimiser; the paper's for CIFAR."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        if train_size is None:
            raise ValueError("WeightWGD needs train_size=N, the number of training points that the posterior is about.")
        return Ensemble(extractors, heads, self.layer(len(extractors), count=train_size), at="weights")

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(ens, x, y)
