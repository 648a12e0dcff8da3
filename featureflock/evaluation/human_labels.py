"""Human labels, such as CIFAR-10H (Peterson et al., 2019): how close predictions come to what people see in an image.

    h_bc                   fraction of the people who chose class c for example b
    cross-entropy          −(1/B) Σ_b Σ_c h_bc log p_bc               in nats; at least the mean entropy of h
    entropy correlation    Spearman's rank correlation of H(p_b) and H(h_b) over the examples, from −1 to 1

The correlation is 1 if the ensemble is most uncertain about the examples that people disagree on most. Calibrated
scores are those of the cross-validation in calibration.py: each half of the test set at the temperature that was fitted
on the labels of the other half. Human labels are never used for fitting.

Shapes: N examples of the test set, B of them evaluated, C classes.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from featureflock.evaluation.calibration import halves, tempered
from featureflock.evaluation.checks import checked_log_probs, checked_probs
from featureflock.utils.files import read_regular

_FEWEST_AGREEING = 0.5
"""Below this fraction of examples whose most frequent human label is the label, the file is of another test set."""


class HumanScores(NamedTuple):
    """Closeness of predictions to human labels."""

    cross_entropy: float
    entropy_correlation: float | None
    """None if all predictions, or all human labels, are equally uncertain."""


def read_human_labels(path: Path, labels: Tensor, classes: int) -> Tensor:
    """Distributions of human labels (N, C) in float64 from an .npy file of counts or probabilities.

    Args:
        path: the file, with one row per example of the test set, in its order.
        labels: the labels (N,) of the whole test set.
        classes: number of classes.
    """
    try:
        data = read_regular(path, "give an .npy file")
    except OSError as error:
        raise ValueError(str(error)) from error
    if not data.startswith(b"\x93NUMPY"):
        raise ValueError(f"{path} is not an .npy file; write one with numpy.save.")
    try:
        values = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        reason = "contains Python objects, which are not loaded" if "allow_pickle" in str(error) else "is damaged"
        raise ValueError(f"{path} {reason}; write counts or probabilities with numpy.save.") from error
    if values.dtype.kind not in "uif":
        raise ValueError(f"{path} must contain counts or probabilities; it is an array of {values.dtype}.")
    if values.shape != (shape := (len(labels), classes)):
        what = f"{path} has shape {values.shape}; the test set has {shape[0]:,} examples of {shape[1]:,} classes"
        raise ValueError(f"{what}, so {shape} was expected.")
    counts = torch.from_numpy(values.astype(np.float64))
    totals = counts.sum(1)
    for wrong, what in (
        (~torch.isfinite(counts).all(1), "NaN or infinite numbers"),
        ((counts < 0).any(1), "negative numbers"),
        (totals == 0, "no label at all"),
        (~torch.isfinite(totals), "numbers that are too large"),
    ):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{path} has {what} in row {row}; every row must be the counts of the labels of an example."
            )
    human = counts / totals[:, None]
    agreeing = (human.argmax(1) == labels.to(human.device)).double().mean().item()
    if agreeing < _FEWEST_AGREEING:
        what = f"{path} does not fit the test set: its most frequent label is the true one for {100 * agreeing:.0f} %"
        raise ValueError(f"{what} of the examples only; its rows must be in the order of the test set.")
    return human


def human_scores(log_probs: Tensor, human: Tensor) -> HumanScores:
    """Closeness of the ensemble's log-probabilities (B, C) to the distributions of human labels (B, C)."""
    log_p, h = checked_log_probs(log_probs), checked_probs(human)
    if log_p.shape != h.shape:
        raise ValueError(f"log_probs {tuple(log_p.shape)} and human {tuple(h.shape)} must have the same shape.")
    h = h.to(log_p.device)
    cross_entropy = -torch.where(h > 0, h * log_p, 0).sum(1).mean().item()
    # The same counts of other classes are ties, which rounding errors of the sum must not break.
    return HumanScores(cross_entropy, _spearman(_entropy(log_p.exp()), _entropy(h).round(decimals=12)))


def calibrated_human_scores(log_probs: Tensor, human: Tensor, temperatures: Sequence[float]) -> HumanScores:
    """The same after temperature scaling; `temperatures` are those of `calibrated` for the same predictions."""
    parts = []
    for k, (first, second) in enumerate(halves(len(log_probs), len(temperatures) // 2, seed=0)):
        of_first, of_second = temperatures[2 * k : 2 * k + 2]
        for half, temperature in ((first, of_second), (second, of_first)):
            parts.append(human_scores(tempered(log_probs[half], temperature), human[half]))
    correlations = [part.entropy_correlation for part in parts]
    defined = [value for value in correlations if value is not None]
    correlation = sum(defined) / len(defined) if len(defined) == len(parts) else None
    return HumanScores(sum(part.cross_entropy for part in parts) / len(parts), correlation)


def _entropy(p_bc: Tensor) -> Tensor:
    """Entropy in nats, (B,)."""
    entropy_b: Tensor = torch.special.entr(p_bc).sum(1)
    return entropy_b


def _spearman(a_b: Tensor, b_b: Tensor) -> float | None:
    """Spearman's rank correlation, with mean ranks of ties; None if one of the two is constant."""
    from scipy.stats import spearmanr  # takes a second to import

    if len(a_b) < 2 or (a_b == a_b[0]).all() or (b_b == b_b[0]).all():
        return None
    return float(spearmanr(a_b.cpu().numpy(), b_b.cpu().numpy()).statistic)
