"""Classification metrics: accuracy, NLL, Brier score, calibration error, selective risk.

    log p̄     = logsumexp_i log p_i − log n                               the ensemble's prediction
    accuracy  = (1/B) Σ_b 1[argmax_c p_bc = y_b]                          ties: the first class
    NLL       = −(1/B) Σ_b log p_{b, y_b}                                 in nats
    Brier     = (1/B) Σ_b Σ_c (p_bc − 1[y_b = c])²                        from 0 to 2
    ECE       = Σ_k (|bin k| / B) |confidence_k − accuracy_k|             bins (k/15, (k+1)/15] of the top probability
    risk(j/B) = errors among the j most confident / j,    AURC = (1/B) Σ_j risk(j/B)

All functions take tensors or NumPy arrays, and everything is computed in float64. `scores` takes log-probabilities,
which do not underflow: its NLL is finite for the log_softmax of finite logits.

Examples are ordered by 1 − max_c p_c, the sum over the other classes, because 1 − p rounds to 0 for many predictions of
a well-trained network. Ties count as in random order (the expected risk).

Shapes: n members, k test sets, B examples, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor, check_shape, checked_labels, checked_log_probs, checked_probs

BINS, SLICE = 15, 2**17
"""Bins of the ECE, and numbers processed at a time."""
_MAX_BINS = 100_000


class Scores(NamedTuple):
    """Metrics of one test set. Higher accuracy is better; for all others, lower is better."""

    accuracy: float
    nll: float
    brier: float
    ece: float
    aurc: float


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram, (bins,) each. Bin k is (edges[k], edges[k + 1]] of the top probability."""

    edges: Tensor
    """(bins + 1,), from 0 to 1."""
    count: Tensor
    confidence: Tensor
    """Mean top probability; NaN for empty bins, as the accuracy."""
    accuracy: Tensor


class RiskCoverage(NamedTuple):
    """Error rate among the most confident examples, by their fraction: 1/B, 2/B, …, 1."""

    coverage: Tensor
    risk: Tensor


def average(member_log_probs: Tensor) -> Tensor:
    """log p̄, (B, C): the log of the members' mean probability, from (n, B, C)."""
    member_log_probs = as_tensor(member_log_probs)
    check_shape(member_log_probs, "member_log_probs", members=True)
    n, b, c = member_log_probs.shape
    width = max(1, SLICE // (n * c))  # allocating large float64 arrays is slow
    parts = zip(range(0, b, width), member_log_probs.split(width, 1), strict=True)
    return torch.cat([mean_log_probs(checked_log_probs(part, members=True, first=k)) for k, part in parts])


def scores(log_probs: Tensor, labels: Tensor) -> Scores:
    """All metrics at once, from log-probabilities (B, C)."""
    log_p = checked_log_probs(log_probs)
    y, p = checked_labels(labels, log_p), log_p.exp()
    (top, correct), log_p_y = _top(p, y), log_p.gather(-1, y[:, None])[:, 0]
    return scores_of(torch.stack([correct, log_p_y, _distance(p, y), top, top_error(p)])[:, None])[0]


def mean_scores(each_set: Sequence[Scores]) -> Scores:
    """Mean of each metric over test sets; over 15 corruptions × 5 severities: cA, cNLL, cBrier and cECE."""
    if not each_set:
        raise ValueError("The mean of scores needs at least one test set; got none.")
    return Scores(*(math.fsum(column) / len(each_set) for column in zip(*each_set, strict=True)))


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Fraction of examples whose most probable class is the label, from 0 to 1."""
    p = checked_probs(probs)
    return _top(p, checked_labels(labels, p))[1].mean().item()


def member_accuracy(member_probs: Tensor, labels: Tensor) -> list[float]:
    """Accuracy of each single member, from (n, B, C)."""
    p = checked_probs(member_probs, members=True)
    accuracies: list[float] = _top(p, checked_labels(labels, p))[1].mean(-1).tolist()
    return accuracies


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood in nats. Infinite if a label's probability underflows to 0; see `scores`."""
    p = checked_probs(probs)
    return (-p.log().gather(-1, checked_labels(labels, p)[:, None])).mean().item()


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance from the one-hot label; summed, not averaged, over classes."""
    p = checked_probs(probs)
    return _distance(p, checked_labels(labels, p)).mean().item()


def ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean absolute gap between confidence and accuracy over bins of equal width."""
    return _ece(reliability(probs, labels, bins)).item()


def reliability(probs: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Count, confidence and accuracy for each bin of the top probability."""
    if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= _MAX_BINS:
        raise ValueError(f"bins must be an integer from 1 to {_MAX_BINS:,}; got {bins!r:.20}.")
    p = checked_probs(probs)
    return _reliability(*_top(p, checked_labels(labels, p)), bins)


def risk_coverage(probs: Tensor, labels: Tensor) -> RiskCoverage:
    """Error rate among the most confident examples, for every coverage."""
    p = checked_probs(probs)
    risk = _risk(top_error(p), _top(p, checked_labels(labels, p))[1])
    return RiskCoverage(torch.ones_like(risk).cumsum(-1) / len(risk), risk)


def aurc(probs: Tensor, labels: Tensor) -> float:
    """Area under the risk-coverage curve: mean risk over all coverages."""
    return risk_coverage(probs, labels).risk.mean().item()


def scores_of(outcomes_5kb: Tensor) -> list[Scores]:
    """All metrics from their terms: 1[correct], log p of the label, squared distance, top probability, 1 − top."""
    correct_kb, log_p_y_kb, distance_kb, top_kb, top_error_kb = outcomes_5kb
    columns = [x_kb.mean(-1) for x_kb in (correct_kb, -log_p_y_kb, distance_kb)]
    columns += [_ece(_reliability(top_kb, correct_kb, BINS)), _risk(top_error_kb, correct_kb).mean(-1)]
    return [Scores(*row) for row in torch.stack(columns, -1).tolist()]


def mean_log_probs(log_p_nbc: Tensor) -> Tensor:
    """log p̄ (B, C)."""
    return log_p_nbc.logsumexp(0) - math.log(len(log_p_nbc))


def top_error(p_bc: Tensor) -> Tensor:
    """1 − max_c p_c (B,), accurate also far below the precision of 1."""
    return p_bc.scatter(-1, p_bc.argmax(-1, keepdim=True), 0).sum(-1)


def _top(p_bc: Tensor, y_b: Tensor) -> tuple[Tensor, Tensor]:
    """Top probability, and 1 if its class is the label, else 0."""
    top_b, class_b = p_bc.max(-1)
    return top_b, (class_b == y_b).double()


def _distance(p_bc: Tensor, y_b: Tensor) -> Tensor:
    """Squared distance from the one-hot label (B,)."""
    one_hot_bc = torch.zeros_like(p_bc).scatter_(-1, y_b[:, None], 1)
    return (p_bc - one_hot_bc).square().sum(-1)


def _reliability(top_kb: Tensor, correct_kb: Tensor, bins: int) -> Reliability:
    """For one test set or, with a leading dimension, for several."""
    edges = torch.arange(bins + 1, dtype=torch.float64, device=top_kb.device) / bins
    # edges[k] < top ≤ edges[k + 1]; values that round above 1 are in the last bin.
    bin_kb = torch.bucketize(top_kb.contiguous(), edges[1:-1])
    count = _sums(torch.ones_like(bin_kb), bin_kb, bins)
    return Reliability(edges, count, *(_sums(x_kb, bin_kb, bins) / count for x_kb in (top_kb, correct_kb)))


def _ece(r: Reliability) -> Tensor:
    return (r.count * (r.confidence - r.accuracy).abs()).nansum(-1) / r.count.sum(-1)


def _risk(top_error_kb: Tensor, correct_kb: Tensor) -> Tensor:
    """Error rate among the 1, 2, …, B most confident; ties all count with their mean error rate."""
    top_error_kb, order_kb = top_error_kb.sort(-1)
    wrong_kb = 1 - correct_kb.gather(-1, order_kb)
    place_kb = torch.zeros_like(order_kb)
    place_kb[..., 1:] = (top_error_kb[..., 1:] != top_error_kb[..., :-1]).cumsum(-1)
    ones_kb = torch.ones_like(wrong_kb)
    errors_kb, count_kb = (_sums(x_kb, place_kb, x_kb.shape[-1]) for x_kb in (wrong_kb, ones_kb))
    return (errors_kb / count_kb).gather(-1, place_kb).cumsum(-1) / ones_kb.cumsum(-1)


def _sums(x_kb: Tensor, place_kb: Tensor, places: int) -> Tensor:
    """Sums over entries with the same place."""
    return x_kb.new_zeros(*x_kb.shape[:-1], places).scatter_add_(-1, place_kb, x_kb)
