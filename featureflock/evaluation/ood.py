"""Out-of-distribution detection: does uncertainty separate OOD inputs from in-distribution ones?

Out-of-distribution is the positive class, and larger uncertainty means positive:

    entropy            H[p̄] = −Σ_c p̄_c log p̄_c
    mutual information H[p̄] − (1/n) Σ_i H[p_i]
    top probability    1 − max_c p̄_c

    AUROC = P(u_out > u_in) + ½ P(u_out = u_in)
    AUPR  = Σ_k (recall_k − recall_{k−1}) precision_k       over thresholds from high to low; depends on the sets' sizes
    FPR95 = fraction of in-distribution inputs flagged at the highest threshold that flags at least 95 % of OOD inputs

Shapes: n members, B examples, C classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor, checked_probs
from featureflock.evaluation.diversity import mutual_information
from featureflock.evaluation.metrics.classification import top_error


class Detection(NamedTuple):
    """How well one score separates. Chance level: AUROC ½, FPR95 0.95, AUPR the fraction of OOD inputs."""

    auroc: float
    aupr: float
    fpr95: float


class OutOfDistribution(NamedTuple):
    """How well three measures of an ensemble's uncertainty separate."""

    entropy: Detection
    mutual_information: Detection
    top_probability: Detection


def out_of_distribution(member_probs_in: Tensor, member_probs_out: Tensor) -> OutOfDistribution:
    """Detection of OOD inputs, from members' probabilities (n, B, C) on in-distribution and on OOD inputs."""
    inside, outside = _uncertainties(member_probs_in), _uncertainties(member_probs_out)
    if member_probs_in.shape[::2] != member_probs_out.shape[::2]:
        shapes = f"{tuple(member_probs_in.shape)} and {tuple(member_probs_out.shape)}"
        raise ValueError(f"Both sets must have the same numbers of members and classes; got {shapes}.")
    return OutOfDistribution(*(detection(u_in, u_out) for u_in, u_out in zip(inside, outside, strict=True)))


def detection(uncertainty_in: Tensor, uncertainty_out: Tensor) -> Detection:
    """AUROC, AUPR and FPR95 of any uncertainty measure (B,), given on in-distribution and on OOD inputs."""
    uncertainty_in, uncertainty_out = as_tensor(uncertainty_in), as_tensor(uncertainty_out)
    for name, x in (("uncertainty_in", uncertainty_in), ("uncertainty_out", uncertainty_out)):
        if not isinstance(x, Tensor) or x.dim() != 1 or not len(x) or x.isnan().any():
            raise ValueError(f"{name} must be a tensor of numbers (B,), not empty and without NaN.")
    values, place = torch.cat([uncertainty_in, uncertainty_out]).detach().double().unique(return_inverse=True)
    sides = place.split([len(uncertainty_in), len(uncertainty_out)])
    # Thresholds from high to low.
    fp, tp = (torch.bincount(side, minlength=len(values)).flip(0).cumsum(0) for side in sides)
    fpr, tpr = fp.double() / len(uncertainty_in), tp.double() / len(uncertainty_out)
    zero = fpr.new_zeros(1)
    auroc = torch.trapezoid(torch.cat([zero, tpr]), torch.cat([zero, fpr]))
    aupr = (tpr.diff(prepend=zero) * tp / (tp + fp)).sum()
    fpr95 = fpr[(100 * tp >= 95 * len(uncertainty_out)).nonzero()[0, 0]]
    return Detection(auroc.item(), aupr.item(), fpr95.item())


def _uncertainties(member_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean_bc = checked_probs(member_probs, members=True).mean(0)
    return torch.special.entr(mean_bc).sum(-1), mutual_information(member_probs), top_error(mean_bc)
