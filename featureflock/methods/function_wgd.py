"""function-WGD (Wang et al., 2019, with the paper's update): every member has a head; the particle layer follows."""

from dataclasses import dataclass

from torch import nn

from featureflock.core.priors import Cauchy, Prior
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, Method, TransportSettings


@METHODS.register("function-wgd")
@dataclass(frozen=True)
class FunctionWGD(TransportSettings, Method):
    """Members repel each other in logit space; nothing is shared."""

    title = "function-WGD"

    prior: Prior = Cauchy(1e-6)
    """Prior on each logit. The default is the paper's for CIFAR."""

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads, self.layer(len(extractors)), at="logits")
