"""Conditional redundancy I(Z_i; Z_j | Y): information that the features of two members share beyond the class.

A discriminator w per pair i < j of members classifies whether two features belong to the same example or to two
examples of the same class. The optimal logit is the log density ratio. The estimate is its Donsker-Varadhan bound, with
the logit limited to τ:

    positives (z_i(x), z_j(x), y),    negatives (z_i(x), z_j(x'), y) with x' another example of the class y of x
    discrimination = ½ E_pos[softplus(−w)] + ½ E_neg[softplus(w)]         binary cross-entropy
    I(Z_i; Z_j | Y) ≈ E_pos[f] − log E_neg[exp f],    f = τ tanh(w/τ)

The negative of an example is the next example of its class in the batch, cyclically. The only example of a class in a
batch is left out. Discriminators are MLPs 256-256-100-1 with LeakyReLU(0.2) on z_i, z_j and a 64-dimensional embedding
of the class, as in DICE; all pairs are computed in one call.

Shapes: n members, p = n(n − 1)/2 pairs of them, B examples, H features, C classes.
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAU = 10.0
_WIDTHS, _EMBEDDING, _SLOPE = (256, 256, 100, 1), 64, 0.2


class Discriminators(nn.Module):
    """One discriminator per pair of members; none for a single member."""

    def __init__(self, members: int, features: int, classes: int) -> None:
        super().__init__()
        first_p, second_p = torch.triu_indices(members, members, offset=1)
        self.register_buffer("first", first_p, persistent=False)
        self.register_buffer("second", second_p, persistent=False)
        pairs = len(first_p)
        self.embedding = nn.Parameter(0.1 * torch.randn(pairs, classes, _EMBEDDING))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise((2 * features + _EMBEDDING, *_WIDTHS)):
            deviation = math.sqrt(2 / (1 + _SLOPE**2) / fan_in)
            self.weights.append(nn.Parameter(deviation * torch.randn(pairs, fan_in, fan_out)))
            self.biases.append(nn.Parameter(torch.zeros(pairs, 1, fan_out)))

    first: Tensor
    second: Tensor

    def forward(self, z_nbh: Tensor, partner_b: Tensor, y_b: Tensor) -> Tensor:
        """Logits w (2, p, B): of the positives z_i(x), z_j(x) and of the negatives z_i(x), z_j(x'), x' = x[partner_b].

        The first layer is the sum of three matrix products. They are the same for positives and negatives, so each is
        computed once for all x or classes.
        """
        z_nbh, sizes = z_nbh.to(self.embedding.dtype), (z_nbh.shape[-1], z_nbh.shape[-1], _EMBEDDING)
        of_first, of_second, of_class = self.weights[0].split(sizes, 1)
        a = torch.bmm(z_nbh[self.first], of_first)
        a = a + torch.baddbmm(self.biases[0], self.embedding, of_class)[:, y_b]
        b = torch.bmm(z_nbh[self.second], of_second)
        w = torch.cat([a + b, a + b[:, partner_b]], 1)
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            w = torch.baddbmm(bias, F.leaky_relu(w, _SLOPE), weight)
        return w.view(len(w), 2, len(y_b)).transpose(0, 1)


class DiscriminatorOutput(NamedTuple):
    """Logits of the discriminators for a batch."""

    positive: Tensor
    """Logits of the positives, (p, B)."""
    negative: Tensor
    """Logits of the negatives, (p, B)."""
    weight: Tensor
    """(B,): 1 / (number of examples with a negative), or 0 for an example without one."""

    def discrimination(self) -> Tensor:
        """Binary cross-entropy of the discriminators, (p,); 0 for a batch without negatives."""
        return (self.weight * (F.softplus(-self.positive) + F.softplus(self.negative))).sum(-1) / 2

    def information(self, tau: float = TAU) -> Tensor:
        """Donsker-Varadhan bound on I(Z_i; Z_j | Y) in nats, (p,); 0 for a batch without negatives."""
        positive, negative = (tau * torch.tanh(w / tau) for w in (self.positive, self.negative))
        paired = self.weight.any()
        log_weight = torch.where(paired, self.weight, 1.0).log()  # −∞ for an example without a negative
        information = (self.weight * positive).sum(-1) - (negative + log_weight).logsumexp(-1)
        return torch.where(paired, information, 0.0)


def discriminate(
    discriminators: Callable[[Tensor, Tensor, Tensor], Iterable[Tensor]], z_nbh: Tensor, y_b: Tensor
) -> DiscriminatorOutput:
    """Apply discriminators to the positives and negatives of one batch."""
    partner_b, paired_b = partners(y_b)
    with torch.autocast(z_nbh.device.type, enabled=False):
        positive_pb, negative_pb = discriminators(z_nbh, partner_b, y_b)
    dtype = torch.promote_types(positive_pb.dtype, torch.float32)
    weight_b = paired_b.to(dtype) / paired_b.sum().clamp_min(1)
    return DiscriminatorOutput(positive_pb.to(dtype), negative_pb.to(dtype), weight_b)


def partners(y_b: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the next example of the same class, cyclically, and whether that is a different example."""
    order_b = y_b.argsort(stable=True)
    sorted_b = y_b[order_b]
    position_b = torch.arange(len(y_b), device=y_b.device)
    last_b = torch.ones_like(sorted_b, dtype=torch.bool)
    last_b[:-1] = sorted_b[1:] != sorted_b[:-1]
    start_b = torch.searchsorted(sorted_b, sorted_b)
    partner_b = torch.empty_like(order_b)
    partner_b[order_b] = order_b[torch.where(last_b, start_b, position_b + 1)]
    return partner_b, partner_b != position_b
