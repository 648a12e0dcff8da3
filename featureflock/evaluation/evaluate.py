"""Evaluate run folders: compute missing predictions, then metrics, then comparisons.

    evaluation = evaluate_runs(["runs/a", "runs/b"], EvaluationProtocol(severities=(3,)))
    evaluation.results.groups[0].metrics["nll"].mean

Predictions are cached in the run folders, so that an interrupted evaluation resumes and nothing is computed twice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.data import DataSet, Splits
from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation import cam_cache, test_sets
from featureflock.evaluation import predictions as cache
from featureflock.evaluation.calibration import BOUNDS
from featureflock.evaluation.cam_cache import CachedMaps, MapKind
from featureflock.evaluation.comparison import compare, notes
from featureflock.evaluation.gallery import Images, MemberVotes, disputed_examples, draw_cam_figure
from featureflock.evaluation.human_labels import read_human_labels
from featureflock.evaluation.images import are_images
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.predictions import ExampleCallback, Predictor, load_predictions
from featureflock.evaluation.results import EvaluationResults, RunResult, TestSetInfo
from featureflock.evaluation.run_predictions import (
    Calibration,
    HeldOutCalibration,
    RunPredictions,
    SetPredictions,
    cross_validation,
)
from featureflock.evaluation.runs import TrainedRun, group_runs, read_run, without_seed
from featureflock.evaluation.test_sets import (
    CalibrationChoice,
    EvaluationProtocol,
    EvaluationSet,
    Log,
    all_test_sets,
    has_one_class,
)
from featureflock.tasks import Classification
from featureflock.training.compute import ComputeConfig
from featureflock.training.recipe import recipe_differences
from featureflock.utils.provenance import provenance

EvaluationProgress = Callable[[int, int, str], None]
"""Called with the number of examples done, their total, and the current task."""
_Task = tuple[str, int, Callable[[ExampleCallback], None]]
"""Predictions or maps to compute and cache: title, number of examples, function."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of an evaluation, and the images that they refer to. Together they are all that a report needs."""

    results: EvaluationResults
    images: Images
    """PNG files by name."""


class MeasuredRun(NamedTuple):
    """All numbers of a run, and its votes and maps on the clean test set, from which the report's images are drawn."""

    result: RunResult
    votes: MemberVotes | None
    """None unless there is one class per example."""
    maps: CachedMaps | None


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Runs and their test sets."""

    runs: list[TrainedRun]
    splits: Splits
    data: DataSet
    test_sets: list[EvaluationSet]
    """The clean test set first."""
    mapped: dict[MapKind, list[EvaluationSet]]
    """Images whose class activation maps are compared."""
    names: list[str] = field(default_factory=list)
    """Short name of each run."""
    custom_data: DataSet | None = None
    """The data set, if it was not read from the runs."""
    human: Tensor | None = None
    """Distribution of human labels of each example of the whole test set, (N, C)."""

    def validation_set(self, run: TrainedRun) -> EvaluationSet | None:
        """The validation examples of a run; None if there are none."""
        return test_sets.validation(self.splits if self.custom_data is not None else run.data().load(), run.recipe)


def evaluate_runs(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    data: DataSet | None = None,
    titles: Sequence[str] = (),
    sizes: Sequence[int] = (),
    endpoints: Sequence[str] = (),
    compute: ComputeConfig = ComputeConfig(),
    progress: EvaluationProgress = lambda done, total, task: None,
    log: Log = lambda text: None,
) -> Evaluation:
    """Measure finished runs and compare them.

    Args:
        folders: run folders of one data set: methods × seeds. Runs that differ in their seed alone (or in seed and
            split_seed, if these are equal) are averaged, and differences vs Deep Ensembles are paired by seed.
        protocol: the test sets to use.
        data: the data set, if the runs were trained on custom data.
        titles: row title of each run; by default its method and what tells groups of one method apart.
        sizes: number of members of each run to evaluate, the first ones; by default all. A folder may appear with
            several sizes. Class activation maps are those for the class that all trained members predict.
        endpoints: keys of metrics whose p-values are corrected for one another, row by row, by Holm's method.
        compute: device, memory format and execution mode.
        progress: called after each batch.
        log: called with messages for the user.
    """
    runs = _read_runs(folders, sizes)
    plans = _plans(runs, protocol, data, log)
    for plan in plans:
        _compute_predictions(plan, compute, progress)
    log(f"Computing metrics of {len(runs)} run{'s' * (len(runs) > 1)} on {len(plans[0].test_sets)} test sets.")
    calibrations, note = _calibrations(plans, protocol.calibration, compute, progress)
    measured: dict[str, MeasuredRun] = {}
    for plan in plans:
        for run, name in zip(plan.runs, plan.names, strict=True):
            measured[str(run)] = measure_run(run, plan, name, calibrations[str(run)])
    measured = {str(run): measured[str(run)] for run in runs}
    by_run = dict(zip(map(str, runs), titles, strict=True)) if titles else {}
    return _compare(plans, runs, measured, by_run, endpoints, log, note)


def cache_predictions(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol,
    compute: ComputeConfig,
    *,
    data: DataSet | None = None,
    load_ensemble: Callable[[], Ensemble] | None = None,
) -> None:
    """Compute the predictions and maps that `evaluate_runs` with the same arguments needs, and no metrics.

    `load_ensemble` returns the trained ensemble, if it cannot be rebuilt from the run folder.
    """
    plan = plan_evaluation(folders, protocol, data)
    _compute_predictions(plan, compute, lambda done, total, task: None, load_ensemble)


def plan_evaluation(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol,
    data: DataSet | None = None,
    log: Log = lambda _: None,
    sizes: Sequence[int] = (),
) -> EvaluationPlan:
    """Read the runs and prepare their test sets, which must be the same for all."""
    return _plan(_read_runs(folders, sizes), protocol, data, log)


def _read_runs(folders: Sequence[Path | str], sizes: Sequence[int]) -> list[TrainedRun]:
    if not folders:
        raise ValueError("Give at least one run to evaluate.")
    members: Sequence[int | None] = sizes or [None] * len(folders)
    return [read_run(folder, size) for folder, size in zip(folders, members, strict=True)]


def _plans(
    runs: Sequence[TrainedRun], protocol: EvaluationProtocol, data: DataSet | None, log: Log
) -> list[EvaluationPlan]:
    """A plan for each data set. Several are allowed if they differ in their seed alone."""
    by_data: dict[str, list[TrainedRun]] = {}
    for run in runs:
        by_data.setdefault(json.dumps(run.recipe["data"]) if data is None else "", []).append(run)
    if len({json.dumps(without_seed(run.recipe["data"])) for run in runs}) > 1:
        by_data = {"": list(runs)}
    parts = list(by_data.values())
    plans = [_plan(part, protocol, data, log if k == 0 else lambda _: None) for k, part in enumerate(parts)]
    names = dict(zip(map(str, runs), _names(runs), strict=True))
    return [replace(plan, names=[names[str(run)] for run in plan.runs]) for plan in plans]


def _plan(runs: list[TrainedRun], protocol: EvaluationProtocol, data: DataSet | None, log: Log) -> EvaluationPlan:
    data_set = runs[0].data() if data is None else data
    splits = data_set.load()
    human = None
    if protocol.human_labels is not None:
        human = read_human_labels(protocol.human_labels, splits.test.labels, splits.classes)
    for run in runs[1:] if data is None else []:
        first, other = runs[0].recipe["data"], run.recipe["data"]
        if other != first and run.data().load().test.identity() != splits.test.identity():
            what = "; ".join(recipe_differences(first, other, "data"))
            raise ValueError(f"{runs[0]} and {run} have different test sets ({what}); evaluate them separately.")
    chosen = all_test_sets(splits, data_set, protocol, log)
    mapped = cam_cache.images_to_map(chosen, protocol) if has_one_class(splits) and are_images(splits.test) else {}
    return EvaluationPlan(runs, splits, data_set, chosen, mapped, _names(runs), data, human)


def measure_run(
    run: TrainedRun, plan: EvaluationPlan, name: str, calibration: Calibration = cross_validation
) -> MeasuredRun:
    """Compute all metrics of a run from its cached predictions. `name` identifies it in the results."""
    clean = load_predictions(run, plan.test_sets[0])
    maps = {kind: cached for kind, sets in plan.mapped.items() if (cached := cam_cache.load_maps(run, kind, sets))}
    views, ood, corrupted = {}, {}, dict[str, dict[str, SetPredictions]]()
    for test_set in plan.test_sets:
        read = partial(lambda each: load_predictions(run, each)[:2], test_set)
        lazy = SetPredictions(read, plan.splits.task, calibration)
        match test_set.kind:
            case "view":
                views[test_set.label] = lazy
            case "ood":
                ood[test_set.label] = lazy
            case "corrupted":
                corruption, _, severity = test_set.label.rpartition("-")
                corrupted.setdefault(corruption, {})[severity] = lazy
    on_clean = SetPredictions(lambda: (clean.log_probs, clean.labels), plan.splits.task, calibration)
    by_kind: dict[str, Tensor] = {kind: cached.maps for kind, cached in maps.items()}
    human = None if plan.human is None else plan.human[clean.positions]
    predictions = RunPredictions(on_clean, views, corrupted, ood, by_kind, human)
    result = RunResult(
        name=name,
        method=run.method,
        seed=run.seed,
        members=len(clean.log_probs),
        clean=predictions.clean.scores,
        details=predictions.details,
        summary=summarise(predictions),
        views=predictions.view_results,
        corrupted=predictions.corrupted_scores,
        corrupted_mean=predictions.corrupted_mean,
        ood=predictions.ood_detection,
        maps=predictions.map_similarity,
        training=run.result,
        curves=run.curves,
        recipe=run.recipe,
        environment=run.environment,
    )
    return MeasuredRun(result, MemberVotes.of(clean) if has_one_class(plan.splits) else None, maps.get("clean"))


def _calibrations(
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
            at_bound += BOUNDS[0] in cross_validation(log_probs, labels, range(len(log_probs))).temperatures
    if choice == "cross-validation" or (choice == "auto" and not at_bound):
        return crossed
    sets: dict[str, EvaluationSet] = {}
    tasks = list[_Task]()
    for run, name, plan in runs:
        validation = plan.validation_set(run)
        if validation is None:
            if choice == "auto":
                return crossed
            advice = "train it with --validation 500, or choose another --calibration"
            raise ValueError(f"{run} has no validation examples to fit a temperature on; {advice}.")
        sets[str(run)] = validation
        tasks += _missing_predictions(Predictor(run, compute), name, [validation])
    _run_tasks(tasks, progress)
    held_out: dict[str, HeldOutCalibration] = {}
    for group in group_runs([run for run, _, _ in runs]):
        predictions = [load_predictions(run, sets[str(run)]) for run in group.runs]
        log_probs, labels = torch.cat([p.log_probs for p in predictions], 1), torch.cat([p.labels for p in predictions])
        held_out |= dict.fromkeys(map(str, group.runs), HeldOutCalibration(log_probs, labels))
    if choice == "auto" and any(calibration.temperature() in BOUNDS for calibration in held_out.values()):
        return crossed
    why = (
        f" On the clean test set, {at_bound} of {len(runs)} runs predict a half of the cross-validation without "
        "error, which determines no temperature."
        if at_bound
        else ""
    )
    count = f"{len(next(iter(sets.values())).positions):,} validation examples"
    note = f"Each row has one temperature for all test sets, fitted on the {count} of each of its runs.{why}"
    return held_out, note


def _compute_predictions(
    plan: EvaluationPlan,
    compute: ComputeConfig,
    progress: EvaluationProgress,
    load_ensemble: Callable[[], Ensemble] | None = None,
) -> None:
    """Compute and cache the predictions and maps that are missing."""
    pairs = {run.folder.path: (run, name) for run, name in zip(plan.runs, plan.names, strict=True)}.values()
    predictors = [(Predictor(run, compute, load_ensemble), name) for run, name in pairs]
    _run_tasks([task for predictor, name in predictors for task in _missing(predictor, name, plan)], progress)


def _run_tasks(tasks: list[_Task], progress: EvaluationProgress) -> None:
    """Run the tasks in order; after an interrupt, those that are finished stay cached."""
    total, before, count = sum(size for _, size, _ in tasks), 0, len(tasks)
    try:
        while tasks:
            title, size, run_task = tasks[0]
            done = before
            progress(done, total, title)

            def tick(more: int, title: str = title) -> None:
                nonlocal done
                done += more
                progress(done, total, title)

            run_task(tick)
            before += size  # also counts unreadable examples
            del tasks[0], run_task  # frees the ensemble after the last task of its run
    except KeyboardInterrupt as interrupt:
        cached = f"{count - len(tasks)} of {count} tasks are cached"
        raise KeyboardInterrupt(f"stopped; {cached}, and the same command resumes from there.") from interrupt


def _missing(predictor: Predictor, name: str, plan: EvaluationPlan) -> list[_Task]:
    tasks = _missing_predictions(predictor, name, plan.test_sets)
    for kind, chosen in plan.mapped.items():
        if cam_cache.load_maps(predictor.run, kind, chosen) is None and cam_cache.has_convolutions(predictor):
            run = partial(cam_cache.store_maps, predictor, kind, chosen)
            tasks.append((f"{name}: maps, {kind}", sum(len(test_set.positions) for test_set in chosen), run))
    return tasks


def _missing_predictions(predictor: Predictor, name: str, test_sets: Sequence[EvaluationSet]) -> list[_Task]:
    missing = [each for each in test_sets if not cache.has_predictions(predictor.run, each)]
    return [(f"{name}: {each.name}", len(each.positions), partial(_predict, predictor, each)) for each in missing]


def _predict(predictor: Predictor, test_set: EvaluationSet, tick: ExampleCallback) -> None:
    cache.store_predictions(predictor.run, test_set, cache.predict(predictor, test_set, tick))


def _compare(
    plans: Sequence[EvaluationPlan],
    read: Sequence[TrainedRun],
    measured: dict[str, MeasuredRun],
    titles: dict[str, str],
    endpoints: Sequence[str],
    log: Log,
    note: str,
) -> Evaluation:
    """Results of runs that have been measured; `measured` and `titles` are by str(run)."""
    plan, groups = plans[0], group_runs(read, titles)
    runs = {name: each.result for name, each in measured.items()}
    compared = [compare(group, groups, runs, endpoints) for group in groups]
    remarks = [note] * bool(note) + notes(list(runs.values()), compared, len(plan.test_sets[0].positions))
    for remark in remarks:
        log(remark)
    shown = {group.title: [run for run in group.runs if str(run) in map(str, plan.runs)] for group in groups}
    firsts = {title: measured[str(runs[0])] for title, runs in shown.items() if runs}
    several = {title: run for title, run in firsts.items() if run.result.members > 1}
    votes = {title: run.votes for title, run in several.items() if run.votes is not None}
    disputed, images = disputed_examples(votes, plan.splits.test)
    baseline = next((group.baseline for group in compared if group.baseline is not None), None)
    baseline_first = sorted(several.items(), key=lambda item: item[0] != baseline)
    maps = [(title, run.result.seed, run.maps) for title, run in baseline_first if run.maps is not None]
    figure, drawn = draw_cam_figure(maps, plan.splits.test)
    results = EvaluationResults(
        data=_data_name(plan.data),
        classes=0 if plan.splits.task.kind == "regression" else plan.splits.classes,
        class_names=list(plan.splits.class_names),
        examples=next(iter(runs.values())).clean.examples,
        test_examples=len(plan.splits.test),
        test_sets=[TestSetInfo(s.label, s.kind, len(s.positions), s.source) for s in plan.test_sets],
        notes=[*dict.fromkeys(s.source for s in plan.test_sets if s.source), *remarks],
        runs=list(runs.values()),
        groups=compared,
        provenance=provenance(),
        disputed=disputed,
        cam_figure=figure,
        task=plan.splits.task.kind,
        dense=plan.splits.task.kind == Classification.kind and plan.splits.test.labels.ndim > 1,
    )
    return Evaluation(results, images | drawn)


def _names(runs: Sequence[TrainedRun]) -> list[str]:
    """Short names of runs: the last part of their paths, or as many parts as are needed to tell them apart."""
    parts, depth = [run.folder.path.absolute().parts for run in runs], 1
    while len({part[-depth:] for part in parts}) < len(set(parts)) and depth < max(map(len, parts)):
        depth += 1
    ends = ["" if run.first_members is None else f", first {run.first_members} members" for run in runs]
    return ["/".join(part[-depth:]) + end for part, end in zip(parts, ends, strict=True)]


def _data_name(data: DataSet) -> str:
    """CIFAR10, or HeldOut CIFAR10 for a data set that wraps another."""
    wrapped = [_data_name(part) for part in vars(data).values() if isinstance(part, DataSet)]
    return " ".join([type(data).__name__, *wrapped])
