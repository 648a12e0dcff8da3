"""function-WGD (Wang et al., 2019, with the paper's update): every member has a head; the particle layer follows."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from featureflock.core.priors import Cauchy, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method, SearchSpace, TransportSettings


@METHODS.register("function-wgd")
@dataclass(frozen=True)
class FunctionWGD(TransportSettings, Method):
    """Members repel each other in logit space; nothing is shared."""

    title = "function-WGD"
    search_space: ClassVar[SearchSpace] = {
        "prior.precision": (1e-8, 1e-7, 1e-6, 1e-5, 1e-4),
        "repulsion": (0.1, 0.3, 1.0, 3.0, 10.0),
        "rank": (1, 2, 5, 10),
    }

    prior: Prior = Cauchy(1e-6)
    """Prior on each logit. The default is the paper's for CIFAR."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads, self.layer(len(extractors)), at="logits")
