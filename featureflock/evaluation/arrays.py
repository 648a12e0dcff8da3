"""Evaluate the predictions of any ensemble, of this library or not: tensors or NumPy arrays.

ff.evaluate(member_probs, labels)                                          # (n, B, C) and (B,)
ff.evaluate((means, variances), targets, task=ff.tasks.Regression())       # (n, B) each, and (B,)
"""

from typing import Any

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor, checked_probs
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.metrics.regression import checked_mixture
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions
from featureflock.tasks import Classification, MultiLabel, Task


def evaluate(predictions: Any, targets: Any, task: Task = Classification()) -> dict[str, float]:
    """Return every metric of the registry that applies, by key, from the members' predictions on a test set.

    Args:
        predictions: classification: probabilities (n, B, C), or (n, B, C, H, W) for segmentation. Multi-label: the
            probability of each label, (n, B, L). Regression: a pair (means, variances), (n, B, …) each.
        targets: labels (B,) or (B, H, W); labels of 0 and 1, (B, L); numbers (B, …).
        task: the task that predictions and targets belong to.

    Metrics are after calibration by test-time cross-validation; keys that begin with `raw_` are before it.
    """
    members, y = _members(predictions, as_tensor(targets), task)
    if len(y) < 2:
        raise ValueError(f"evaluate needs at least two examples, so that it can calibrate; got {len(y)}.")
    return summarise(RunPredictions(SetPredictions(lambda: (members, y), task)))


def _members(predictions: Any, y: Any, task: Task) -> tuple[Tensor, Tensor]:
    """Members' predictions as the task defines them, and targets in the shape that belongs to them."""
    if task.kind == "regression":
        if not isinstance(predictions, tuple | list) or len(predictions) != 2:
            raise ValueError("Regression needs predictions as a pair (means, variances), each (members, examples, …).")
        means, variances = predictions
        return checked_mixture(means, variances, y)
    p = as_tensor(predictions)
    if not isinstance(p, Tensor) or not p.is_floating_point() or p.ndim < 3:
        got = f"{p.dtype} of shape {tuple(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
        raise ValueError(f"predictions must be probabilities of shape (members, examples, classes, …); got {got}.")
    if isinstance(task, Classification):
        y = task.targets(p, y)
        dim = task.dim + 1 if task.dim > 0 else p.ndim + task.dim
        checked_probs(p.movedim(dim, -1).flatten(1, -2), members=True)
        return p.detach().double().clamp_min(torch.finfo(torch.float64).tiny).log(), y
    if not isinstance(task, MultiLabel):
        raise ValueError(f"evaluate knows no metrics for {task.name}.")
    y = task.targets(p, y)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("predictions must be probabilities from 0 to 1, one for each label.")
    return torch.logit(p.detach().double(), eps=1e-15), y
