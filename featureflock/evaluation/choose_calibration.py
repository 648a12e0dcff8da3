"""How the runs of an evaluation are calibrated: by cross-validation, or on validation examples."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from featureflock.evaluation.calibration import BOUNDS
from featureflock.evaluation.compute_predictions import EvaluationProgress, Task, missing_predictions, run_tasks
from featureflock.evaluation.plan import EvaluationPlan
from featureflock.evaluation.predictions import Predictor, load_predictions
from featureflock.evaluation.run_predictions import Calibration, HeldOutCalibration, cross_validation
from featureflock.evaluation.runs import group_runs
from featureflock.evaluation.test_sets import CalibrationChoice, EvaluationSet, has_one_class
from featureflock.training.compute import ComputeConfig


def choose_calibrations(
    plans: Sequence[EvaluationPlan], choice: CalibrationChoice, compute: ComputeConfig, progress: EvaluationProgress
) -> tuple[Mapping[str, Calibration], str]:
    """How each run is calibrated, the same way for all, and a note if it is not by cross-validation.

    A temperature from validation examples is shared by the runs that differ in their seed alone.
    """
    runs = [(run, name, plan) for plan in plans for run, name in zip(plan.runs, plan.names, strict=True)]
    crossed: tuple[dict[str, Calibration], str] = {str(run): cross_validation for run, _, _ in runs}, ""
    at_bound = 0
    if not all(has_one_class(plan.splits) for plan in plans):
        if choice == "held-out":
            raise ValueError("Only classification, with one class per example, is calibrated on validation examples.")
        return crossed
    if choice == "auto":
        for run, _, plan in runs:
            log_probs, labels, _ = load_predictions(run, plan.test_sets[0])
            at_bound += at_lower_bound(log_probs, labels)
    if choice == "cross-validation" or (choice == "auto" and not at_bound):
        return crossed
    sets: dict[str, EvaluationSet] = {}
    tasks = list[Task]()
    for run, name, plan in runs:
        validation = plan.validation_set(run)
        if validation is None:
            if choice == "auto":
                return crossed
            advice = "train it with --validation 500, or choose another --calibration"
            raise ValueError(f"{run} has no validation examples to fit a temperature on; {advice}.")
        sets[str(run)] = validation
        tasks += missing_predictions(Predictor(run, compute), name, [validation])
    run_tasks(tasks, progress)
    held_out: dict[str, HeldOutCalibration] = {}
    for group in group_runs([run for run, _, _ in runs]):
        calibration = held_out_calibration([load_predictions(run, sets[str(run)])[:2] for run in group.runs])
        held_out |= dict.fromkeys(map(str, group.runs), calibration)
    if choice == "auto" and any(calibration.temperature() in BOUNDS for calibration in held_out.values()):
        return crossed
    return held_out, held_out_note(len(next(iter(sets.values())).positions), at_bound, len(runs))


def at_lower_bound(log_probs: Tensor, labels: Tensor) -> bool:
    """Whether half of a test set is predicted without error, so that cross-validation determines no temperature."""
    return BOUNDS[0] in cross_validation(log_probs, labels, range(len(log_probs))).temperatures


def held_out_calibration(runs: Sequence[tuple[Tensor, Tensor]]) -> HeldOutCalibration:
    """One calibration for runs that differ in their seed alone, from predictions and labels of validation examples."""
    members, labels = zip(*runs, strict=True)
    return HeldOutCalibration(torch.cat(members, 1), torch.cat(labels))


def held_out_note(examples: int, at_bound: int, runs: int) -> str:
    """What readers of the results need to know; `at_bound` of the runs made held-out examples necessary."""
    why = (
        f" On the clean test set, {at_bound} of {runs} runs predict a half of the cross-validation without error, "
        "which determines no temperature."
        if at_bound
        else ""
    )
    fitted = f"fitted on the {examples:,} validation examples of each of its runs"
    return f"Each row has one temperature for all test sets, {fitted}.{why}"
