"""Scores of any task, raw and calibrated by test-time cross-validation.

    scores, calibrations = cross_validated(task, members, y)

The protocol is that of calibration.py: fit on one half of the test set and score the other, both ways, for 5 shuffles.

Shapes: n members, B examples.
"""

from math import fsum

from torch import Tensor

from featureflock.evaluation.calibration import fit_temperature, halves
from featureflock.evaluation.metrics.classification import average
from featureflock.evaluation.metrics.multilabel import scores_from_logits
from featureflock.evaluation.metrics.regression import regression_scores
from featureflock.evaluation.metrics.segmentation import pixels
from featureflock.tasks import Classification, MultiLabel, Task
from featureflock.tasks.multilabel import mean_logit

ScoreDict = dict[str, float]


def task_scores(task: Task, members: Tensor, y: Tensor) -> ScoreDict:
    """Metrics of a multi-label or regression task, from the members' predictions."""
    if isinstance(task, MultiLabel):
        return scores_from_logits(mean_logit(members.double()), y)._asdict()
    return regression_scores(members, y)._asdict()


def unchanged(scores: ScoreDict) -> ScoreDict:
    """Scores that calibration does not change; they are computed on the whole test set."""
    names = ("rmse", "exact_match", "label_accuracy", "macro_f1", "mean_average_precision")
    return {name: scores[name] for name in names if name in scores}


def fit_calibration(task: Task, members: Tensor, y: Tensor) -> float:
    """The temperature, or scale of the variance, that minimises the NLL."""
    if isinstance(task, Classification):
        log_probs, labels = pixels(task, members, y)
        return fit_temperature(average(log_probs), labels)
    return task.fit_calibration(members.double(), y)


def cross_validated(task: Task, members: Tensor, y: Tensor, shuffles: int = 5) -> tuple[ScoreDict, list[float]]:
    """Mean of the scores over halves, each calibrated on the other half, and the fitted calibrations."""
    each, fitted = list[ScoreDict](), list[float]()
    for pair in halves(len(y), shuffles, seed=0):
        calibrations = [task.fit_calibration(members[:, half].double(), y[half]) for half in pair]
        for half, other in zip(pair, reversed(calibrations), strict=True):
            each.append(task_scores(task, task.calibrated(members[:, half].double(), other), y[half]))
        fitted += calibrations
    return {key: fsum(scores[key] for scores in each) / len(each) for key in each[0]}, fitted
