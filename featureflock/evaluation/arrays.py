"""Arrays of any origin as the members' predictions that a task defines. What cannot be right is refused.

Probabilities and logits are never guessed: rows of probabilities must sum to 1, and logits are named as such.

Shapes: n members, B examples, C classes, L labels.
"""

from typing import Any

import torch
from torch import Tensor

from featureflock.evaluation.checks import TOLERANCE, as_tensor, kind_of
from featureflock.tasks import Classification, MultiLabel, Task
from featureflock.tasks.base import high_precision

LOG_ZERO = -708.0
"""Stands for the logarithm of a probability that is exactly 0: the smallest that exp does not round to 0."""


def member_predictions(array: Any, task: Task, *, logits: bool, advice: str) -> Tensor:
    """Log-probabilities (n, B, C, …) of classes, or logits (n, B, L) of labels, on the CPU.

    Args:
        array: probabilities, or with `logits` logits or log-probabilities: a tensor or an array.
        task: classification or multi-label.
        logits: whether they are logits.
        advice: what to do if they are logits and `logits` is false.
    """
    p = as_tensor(array)
    if not isinstance(p, Tensor) or not p.is_floating_point():
        how = "; stack lists of members with np.stack" if isinstance(p, list | tuple) else ""
        raise ValueError(f"predictions must be a tensor or array of floating-point numbers; got {kind_of(p)}{how}.")
    if p.ndim < 3 or 0 in p.shape:
        how = ". A single network is an ensemble of one: array[None]" if p.ndim == 2 else ""
        shape = "(members, examples, classes, …) without empty dimensions"
        raise ValueError(f"predictions must have shape {shape}; got {tuple(p.shape)}{how}.")
    p = p.detach().cpu()
    for i, member in enumerate(p):
        bad = member.isnan() | (member == torch.inf)
        if bad.any():
            raise ValueError(f"predictions must not be NaN or infinite; example {_first(bad)} of member {i} is.")
    if isinstance(task, Classification):
        task.check_outputs(p)
        return _class_log_probs(p, p.ndim + task.dim if task.dim < 0 else task.dim + 1, logits, advice)
    if isinstance(task, MultiLabel):
        return _label_logits(p, logits, advice)
    raise ValueError(f"There are no metrics for {task.name}.")


def _class_log_probs(p: Tensor, dim: int, logits: bool, advice: str) -> Tensor:
    sums = [member.double().sum(dim - 1) for member in p]
    rounding = torch.finfo(p.dtype).eps / 2
    off = [(each - 1).abs() > max(TOLERANCE, rounding) for each in sums]
    like_probs = not (p < 0).any() and not any(each.any() for each in off)
    if logits:
        if like_probs:
            raise ValueError(
                "these are probabilities, not logits: none is negative, and all sum to 1 over the classes."
            )
        return _finite(high_precision(p)).log_softmax(dim)
    if not like_probs:
        i = next((i for i, member in enumerate(p) if (member < 0).any() or off[i].any()))
        negative = (p[i] < 0).any(dim - 1)
        wrong = negative if negative.any() else off[i]
        what = "has a negative one" if negative.any() else f"sums to {sums[i][wrong][0].item():.6g}"
        where = f"example {_first(wrong)} of member {i}"
        raise ValueError(
            f"probabilities must not be negative and must sum to 1 over the classes; {where} {what}. "
            f"If these are logits, {advice}."
        )
    log_p = _finite(high_precision(p).log())
    return log_p.log_softmax(dim) if rounding > TOLERANCE else log_p  # bfloat16: sums are off by rounding alone


def _label_logits(p: Tensor, logits: bool, advice: str) -> Tensor:
    if logits:
        return high_precision(p)
    if not ((p >= 0) & (p <= 1)).all():
        wrong = (p < 0) | (p > 1)
        raise ValueError(
            f"each label needs a probability from 0 to 1; got {p[wrong][0].item():g}. If these are logits, {advice}."
        )
    return torch.logit(p.double(), eps=1e-15)


def _finite(log_p: Tensor) -> Tensor:
    return log_p.clamp_min(LOG_ZERO)


def _first(bad: Tensor) -> int:
    """Index of the first example (dimension 0) with a true entry."""
    return int(bad.nonzero()[0, 0])
