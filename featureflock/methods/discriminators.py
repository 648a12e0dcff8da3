"""Conditional redundancy: what two members' features tell of each other beyond the class, I(Z_i; Z_j | Y).

A discriminator w for each pair i < j of members learns to tell features of one example from features of two examples
of one class. At its optimum its logit is the logarithm of the ratio of the densities, and Donsker and Varadhan's bound
on that logit, kept below τ, is the estimate:

    positives (z_i(x), z_j(x), y),    negatives (z_i(x), z_j(x'), y) with x' another example of the class y of x
    discrimination = ½ E_pos[softplus(−w)] + ½ E_neg[softplus(w)]         binary cross-entropy
    I(Z_i; Z_j | Y) ≈ E_pos[f] − log E_neg[exp f],    f = τ tanh(w/τ)

The negative of an example is the next example of its class in the batch, round about; an example that is the only one
of its class is left out. Discriminators are perceptrons 256-256-100-1 with LeakyReLU(0.2) of z_i, z_j and an
embedding of the class in 64 numbers, as DICE has them; those of all pairs are computed at once.

Shapes: n members, p = n(n − 1)/2 pairs of them, B examples, H features, C classes.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAU = 10.0
_WIDTHS = 256, 256, 100, 1
_EMBEDDING = 64
_SLOPE = 0.2


class Discriminators(nn.Module):
    """One for each pair of members, with weights of its own.

    Args:
        members: n; less than two have no pairs, and no discriminator.
        features, classes: H and C.
    """

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

    def forward(self, z_nbh: Tensor, other_nbh: Tensor, y_b: Tensor) -> Tensor:
        """w (p, B) of features of the first member and, in `other_nbh`, of the second."""
        z = torch.cat([z_nbh[self.first], other_nbh[self.second]], -1).to(self.embedding.dtype)
        a = torch.cat([z, self.embedding[:, y_b]], -1)
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            a = torch.baddbmm(bias, a if k == 0 else F.leaky_relu(a, _SLOPE), weight)
        return a.squeeze(-1)


class DiscriminatorOutput(NamedTuple):
    """What discriminators say of a batch."""

    positive: Tensor
    """w of the positives, (p, B)."""
    negative: Tensor
    """w of the negatives, (p, B)."""
    share: Tensor
    """(B,): 1 over the number of examples with a negative, or 0 for one without."""

    def discrimination(self) -> Tensor:
        """The discriminators' binary cross-entropy, (p,); 0 for a batch without negatives."""
        return (self.share * (F.softplus(-self.positive) + F.softplus(self.negative))).sum(-1) / 2

    def information(self, tau: float = TAU) -> Tensor:
        """Donsker and Varadhan's bound on I(Z_i; Z_j | Y) in nats, (p,); 0 for a batch without negatives."""
        positive, negative = (tau * torch.tanh(w / tau) for w in (self.positive, self.negative))
        paired = self.share.any()
        log_share = torch.where(paired, self.share, 1.0).log()  # −∞ for an example without a negative
        information = (self.share * positive).sum(-1) - (negative + log_share).logsumexp(-1)
        return torch.where(paired, information, 0.0)


def judge(
    discriminators: Callable[[Tensor, Tensor, Tensor], Tensor], z_nbh: Tensor, y_b: Tensor
) -> DiscriminatorOutput:
    """What discriminators say of all members' features of one batch."""
    partner_b, paired_b = partners(y_b)
    with torch.autocast(z_nbh.device.type, enabled=False):
        # Both in one call, which takes less than two.
        w_p2b = discriminators(z_nbh.repeat(1, 2, 1), torch.cat([z_nbh, z_nbh[:, partner_b]], 1), y_b.repeat(2))
    w_p2b = w_p2b.to(torch.promote_types(w_p2b.dtype, torch.float32))
    share_b = paired_b.to(w_p2b.dtype) / paired_b.sum().clamp_min(1)
    positive_pb, negative_pb = w_p2b.chunk(2, -1)
    return DiscriminatorOutput(positive_pb, negative_pb, share_b)


def partners(y_b: Tensor) -> tuple[Tensor, Tensor]:
    """For each example the position of the next one of its class, round about, and whether that is another one."""
    order_b = y_b.argsort(stable=True)
    sorted_b = y_b[order_b]
    position_b = torch.arange(len(y_b), device=y_b.device)
    last_b = torch.ones_like(sorted_b, dtype=torch.bool)
    last_b[:-1] = sorted_b[1:] != sorted_b[:-1]
    start_b = torch.searchsorted(sorted_b, sorted_b)
    partner_b = torch.empty_like(order_b)
    partner_b[order_b] = order_b[torch.where(last_b, start_b, position_b + 1)]
    return partner_b, partner_b != position_b
