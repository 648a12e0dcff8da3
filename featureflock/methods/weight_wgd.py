"""weight-WGD (D'Angelo and Fortuin, 2021, with the paper's update): members repel each other in weight space.

A particle is the vector of all trainable weights of a member, including its head. The data gradient is that of the full
data set of N points, estimated as N/B times the gradient of the mini-batch. The update is v/N, so prior and repulsion
are scaled by 1/N.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from featureflock.core.priors import Normal, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method, SearchSpace, TransportSettings


@METHODS.register("weight-wgd")
@dataclass(frozen=True)
class WeightWGD(TransportSettings, Method):
    """Members repel each other in weight space; nothing is shared."""

    title = "weight-WGD"
    search_space: ClassVar[SearchSpace] = {
        "prior.precision": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        "repulsion": (1.0, 10.0, 100.0, 1e3, 1e4),
        "rank": (1, 2, 5, 10),
    }

    prior: Prior = Normal(1e-3)
    """Prior on each weight, in addition to weight decay. The default is the paper's for CIFAR."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        if self.reference_batch is not None:
            raise ValueError(
                "WeightWGD has no reference_batch: its repulsion does not depend on the batch; leave it out."
            )
        if train_size is None:
            raise ValueError("WeightWGD needs train_size=N, the number of training points.")
        return Ensemble(extractors, heads, self.layer(len(extractors), count=train_size), at="weights")
