"""Deep Ensembles (Lakshminarayanan et al., 2017): networks that differ by their initial weights alone.

    loss = Σ_i CE_i

Nothing is shared and the losses are summed, so each member gets exactly the gradient that it would get alone, and
becomes, run one after another, bit for bit what training it alone gives. Only dropout masks are drawn from one stream
of random numbers for all members: with dropout, they are as likely as those that training alone would draw.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import Method


@dataclass(frozen=True)
class DeepEnsembles(Method):
    """Independent networks, each trained by maximum likelihood."""

    title = "Deep Ensembles"

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads)

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(logits, y) for logits in ens(x)]).sum()
