"""A report about the predictions of any ensemble."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from featureflock.evaluation import evaluate_predictions
from featureflock.evaluation.test_sets import CalibrationChoice
from featureflock.reports.write import write_report
from featureflock.tasks import Classification, Task
from featureflock.utils.files import check_folder


def report(
    methods: Any,
    labels: Any,
    folder: str | os.PathLike[str] = "featureflock-report",
    task: Task = Classification(),
    *,
    logits: bool = False,
    baseline: str | None = None,
    calibration: CalibrationChoice = "auto",
    data: str = "custom data",
    class_names: Sequence[str] = (),
) -> Path:
    """Compare the predictions of ensembles of any origin on one HTML page with tables and figures.

        ff.report({"mine": {0: probs_0, 1: probs_1}, "Deep Ensembles": {0: …, 1: …}}, labels, "my-report")

    Args:
        methods: predictions by method and seed; or those of one ensemble. Each is an array (n, B, C), or a dictionary
            of arrays for several test sets: `{"probs": …, "corrupted/fog/3": …, "ood/svhn": …}`.
        labels: class indices (B,), or other targets.
        folder: output folder for report.html, results.json, table.md, table.tex and figures/.
        task: the task that predictions and labels belong to.
        logits: whether arrays are logits or log-probabilities. In a dictionary, name them `logits` instead of `probs`.
        baseline: the method that differences are from, paired by seed; by default Deep Ensembles, if there are any.
        calibration: where temperatures are fitted, as in `EvaluationProtocol`; the held-out examples are the arrays
            `validation` and `validation_labels` in the dictionary of each run.
        data: name of the data, for titles.
        class_names: names of the classes.

    Returns:
        The path of report.html.
    """
    folder = Path(folder)
    check_folder(folder)
    results = evaluate_predictions(
        methods,
        labels,
        task,
        logits=logits,
        baseline=baseline,
        calibration=calibration,
        data=data,
        class_names=class_names,
    )
    return write_report(results, {}, folder)
