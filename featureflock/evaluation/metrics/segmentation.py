"""Segmentation: pixels as examples of classification, and the mean intersection over union.

    IoU_c = TP_c / (TP_c + FP_c + FN_c),    mean IoU = mean over the classes that occur or are predicted

Accuracy, NLL, Brier score, ECE and AURC of segmentation are those of all pixels.

Shapes: n members, B examples, C classes, P labelled pixels of all examples.
"""

from typing import Any

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor, checked_labels, checked_probs
from featureflock.tasks import Classification


def mean_iou(probs: Any, labels: Any) -> float:
    """Mean intersection over union, from probabilities (B, C, H, W) or (P, C), and labels (B, H, W) or (P,)."""
    p, y = as_tensor(probs), as_tensor(labels)
    if isinstance(p, Tensor) and p.ndim > 2:
        p, shape = p.movedim(1, -1).flatten(0, -2), (p.shape[0], *p.shape[2:])
        if not isinstance(y, Tensor) or y.shape != shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"labels must have shape {shape}, one for each pixel; got {got}.")
        y = y.flatten()
    p = checked_probs(p)
    return iou_of_classes(p.argmax(-1), checked_labels(y, p), p.shape[-1])


def iou_of_classes(predicted: Tensor, labels: Tensor, classes: int) -> float:
    """Mean intersection over union, from class indices of one shape."""
    confusion = torch.bincount(labels.flatten() * classes + predicted.flatten(), minlength=classes**2)
    confusion = confusion.view(classes, classes).double()
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return (confusion.diagonal()[union > 0] / union[union > 0]).mean().item()


def pixels(task: Classification, members: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (n, P, C) and labels (P,) of all labelled pixels or tokens; (n, B, C) stays as it is."""
    dim = task.dim + 1 if task.dim > 0 else members.ndim + task.dim
    rows, y = members.movedim(dim, -1).flatten(1, -2), labels.flatten()
    if task.ignore_index is not None:
        labelled = y != task.ignore_index
        rows, y = rows[:, labelled], y[labelled]
    return rows, y
