"""Endpoints: the metrics that a comparison is about, declared before any result is known.

Their p-values are corrected for one another by Holm's method, and the verdict of a report is about them. A study may
declare its own; the default ones of classification are the columns of the paper's tables.
"""

from collections.abc import Iterable

from featureflock.evaluation.results import RunResult

CLEAN = ("accuracy", "nll", "brier", "ece")
CORRUPTED = ("corrupted_accuracy", "corrupted_nll", "corrupted_brier", "corrupted_ece")
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "classification": (*CLEAN, *CORRUPTED),
    "multi-label": ("mean_average_precision", "label_accuracy", "nll", "label_brier", "label_ece"),
    "regression": ("rmse", "nll", "crps", "calibration_error"),
}
"""Keys of metrics, by kind of task."""
ACCURACY_MARGIN = 0.001
"""A method is as accurate as another if the interval of their difference excludes a larger loss: 0.1 points."""


def default_endpoints(task: str, runs: Iterable[RunResult]) -> tuple[str, ...]:
    """The endpoints of a kind of task that all runs have: without those of corrupted images, if there are none."""
    summaries = [run.summary for run in runs]
    return tuple(key for key in ENDPOINTS.get(task, ()) if all(key in summary for summary in summaries))
