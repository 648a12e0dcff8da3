"""Diversity of the members' predictions.

    disagreement        = mean over pairs i < j and examples of 1[argmax p_i ≠ argmax p_j]
    mutual information  = (1/n) Σ_i KL(p_i ‖ p̄) = H[p̄] − (1/n) Σ_i H[p_i]            in nats, from 0 to log n
    predictive variance = (1/n) Σ_i Σ_c (p_ic − p̄_c)²

Predictive variance is the gain from averaging: the members' mean Brier score minus that of the ensemble, for any
labels. More diversity is not better in itself: weaker members also differ more (arXiv 2302.00704).

Shapes: n members, B examples, C classes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.evaluation.checks import checked_probs


class Diversity(NamedTuple):
    """Diversity measures, means over a test set."""

    disagreement: float
    mutual_information: float
    predictive_variance: float


def member_diversity(member_probs: Tensor) -> Diversity:
    """All three measures, from (n, B, C) with at least two members."""
    means = [measure(member_probs).mean().item() for measure in (mutual_information, predictive_variance)]
    return Diversity(disagreement(member_probs), *means)


def disagreement(member_probs: Tensor) -> float:
    """Fraction of pairs of members and examples for which the two predict different classes."""
    p_nbc = checked_probs(member_probs, members=True)
    n, b, c = p_nbc.shape
    if n < 2:
        raise ValueError("Disagreement needs at least two members; there is only one.")
    votes_bc = F.one_hot(p_nbc.argmax(-1), c).sum(0)
    agreeing = int((votes_bc * (votes_bc - 1)).sum())  # ordered pairs
    return 1 - agreeing / (b * n * (n - 1))


def mutual_information(member_probs: Tensor) -> Tensor:
    """Epistemic uncertainty of each example (B,): mutual information between prediction and member. 0 for n = 1."""
    p_nbc = checked_probs(member_probs, members=True)
    ratio_nbc = p_nbc / p_nbc.mean(0).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.xlogy(p_nbc, ratio_nbc).sum(-1).mean(0).clamp_min(0)


def predictive_variance(member_probs: Tensor) -> Tensor:
    """Variance of the members' probabilities, summed over classes, for each example (B,). 0 for one member."""
    return checked_probs(member_probs, members=True).var(0, correction=0).sum(-1)
