"""Multi-label metrics, from the probability of each label.

    label accuracy = fraction of all (example, label) pairs that are correct at the threshold ½
    exact match    = fraction of examples whose labels are all correct
    macro F1       = mean over labels of 2 TP / (2 TP + FP + FN)                 labels that occur or are predicted
    mAP            = mean over labels of the average precision                   labels with a positive example
    NLL            = mean binary cross-entropy of the pairs; Brier = mean squared error of their probabilities
    ECE            = Σ_k (|bin k| / BL) |mean probability − fraction of positives|      15 bins of the probability

Shapes: B examples, L labels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor

BINS = 15


class MultiLabelScores(NamedTuple):
    """Metrics of one test set. For NLL, Brier score and ECE, lower is better; for the others, higher."""

    label_accuracy: float
    exact_match: float
    macro_f1: float
    mean_average_precision: float
    nll: float
    label_brier: float
    label_ece: float


def multilabel_scores(probs: Any, labels: Any) -> MultiLabelScores:
    """All metrics, from probabilities (B, L) and labels (B, L) of 0 and 1; tensors or NumPy arrays."""
    p, y = as_tensor(probs), as_tensor(labels)
    if not isinstance(p, Tensor) or not isinstance(y, Tensor) or p.ndim < 2 or p.shape != y.shape or not p.numel():
        shapes = " and ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in (p, y))
        raise ValueError(f"probs and labels must be tensors or arrays of one shape (examples, labels); got {shapes}.")
    if not p.is_floating_point() or y.is_complex():
        raise ValueError(f"probs must be floating-point numbers, and labels 0 or 1; got {p.dtype} and {y.dtype}.")
    p, y = p.detach().double(), y.detach().double()
    if not ((p >= 0) & (p <= 1)).all() or not ((y == 0) | (y == 1)).all():
        raise ValueError("probs must be from 0 to 1, and labels 0 or 1, for each example and label.")
    return scores_from_logits(torch.logit(p), y)


def scores_from_logits(logit: Tensor, y: Tensor) -> MultiLabelScores:
    """All metrics, from the logits of the averaged probabilities (B, L)."""
    logit, y = logit.double().movedim(1, -1).flatten(0, -2), y.double().movedim(1, -1).flatten(0, -2)
    p, positive = logit.sigmoid(), y > 0.5
    correct = (logit > 0) == positive
    both = (logit > 0) & positive
    size = (logit > 0).sum(0) + positive.sum(0)
    f1 = 2 * both.sum(0)[size > 0] / size[size > 0]
    nll = torch.where(positive, torch.nn.functional.softplus(-logit), torch.nn.functional.softplus(logit))
    return MultiLabelScores(
        correct.double().mean().item(),
        correct.all(1).double().mean().item(),
        f1.mean().item() if len(f1) else 0.0,
        _mean_average_precision(logit, positive),
        nll.mean().item(),
        (p - y).square().mean().item(),
        _ece(p.flatten(), y.flatten()),
    )


def _mean_average_precision(scores: Tensor, positive: Tensor) -> float:
    each = [_average_precision(s, p) for s, p in zip(scores.T, positive.T, strict=True) if p.any()]
    return sum(each) / len(each) if each else 0.0


def _average_precision(scores: Tensor, positive: Tensor) -> float:
    """Σ_k (R_k − R_{k−1}) P_k over the distinct thresholds from high to low; ties share one threshold."""
    values, place = scores.unique(return_inverse=True)
    predicted = torch.bincount(place, minlength=len(values)).flip(0)
    hits = torch.bincount(place[positive], minlength=len(values)).flip(0)
    precision = hits.cumsum(0) / predicted.cumsum(0)
    return float((hits * precision).sum() / hits.sum())


def _ece(p: Tensor, y: Tensor) -> float:
    edges = torch.arange(1, BINS, dtype=torch.float64, device=p.device) / BINS
    place = torch.bucketize(p, edges)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=p.device).scatter_add_(0, place, p - y)
    return (gaps.abs().sum() / len(p)).item()
