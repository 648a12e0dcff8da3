"""Evaluate run folders: compute missing predictions, then metrics, then comparisons.

    evaluation = evaluate_runs(["runs/a", "runs/b"], EvaluationProtocol(severities=(3,)))
    evaluation.results.groups[0].metrics["nll"].mean

Predictions are cached in the run folders, so that an interrupted evaluation resumes and nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from featureflock.data import DataSet, Splits
from featureflock.evaluation.cam_cache import (
    CachedMaps,
    MapKind,
    has_convolutions,
    has_maps,
    images_to_map,
    load_maps,
    store_maps,
)
from featureflock.evaluation.comparison import compare, notes
from featureflock.evaluation.gallery import Images, MemberVotes, cam_figure, disputed_examples
from featureflock.evaluation.images import are_images
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.predictions import (
    Predictions,
    Predictor,
    Tick,
    has_predictions,
    load_predictions,
    predict,
    store_predictions,
)
from featureflock.evaluation.results import EvaluationResults, GroupResult, RunResult, TestSetInfo
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions
from featureflock.evaluation.runs import RunGroup, TrainedRun, group_runs, read_run
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet, all_test_sets
from featureflock.training.compute import ComputeConfig
from featureflock.training.recipe import recipe_differences
from featureflock.utils.provenance import provenance

EvaluationProgress = Callable[[int, int, str], None]
"""Called with the number of examples done, their total, and the current task."""
Log = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of an evaluation, and the images that they refer to. Together they are all that a report needs."""

    results: EvaluationResults
    images: Images
    """PNG files by name."""


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """All numbers of a run, and what the images of a report are made from."""

    result: RunResult
    votes: MemberVotes
    """On the clean test set."""
    maps: CachedMaps | None
    """On images of the clean test set."""


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Runs, and what they are tested on."""

    runs: list[TrainedRun]
    splits: Splits
    data: DataSet
    test_sets: list[EvaluationSet]
    """The clean test set first."""
    mapped: dict[MapKind, list[EvaluationSet]]
    """Images whose class activation maps are compared."""
    titles: dict[str, str] = field(default_factory=dict)
    """Row titles by run, if they are given."""


def evaluate_runs(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    data: DataSet | None = None,
    titles: Sequence[str] = (),
    compute: ComputeConfig = ComputeConfig(),
    progress: EvaluationProgress = lambda done, total, task: None,
    log: Log = lambda text: None,
) -> Evaluation:
    """Measure finished runs and compare them.

    Args:
        folders: run folders of one data set: methods × seeds. Runs that differ in their seed alone are averaged, and
            differences vs Deep Ensembles are paired by seed.
        protocol: what to test on.
        data: the data set, if the runs were trained on custom data.
        titles: row title of each run; by default its method and what tells groups of one method apart.
        compute: device, memory format and execution mode.
        progress: called after each batch.
        log: called with messages for the user.
    """
    plan = plan_evaluation(folders, protocol, data=data, log=log)
    plan = replace(plan, titles=dict(zip(map(str, plan.runs), titles, strict=True)) if titles else {})
    compute_predictions(plan, compute, progress)
    log(f"Computing metrics of {len(plan.runs)} run{'s' * (len(plan.runs) > 1)} on {len(plan.test_sets)} test sets.")
    names = _names(plan.runs)
    measured = {str(run): measure_run(run, plan, names[str(run)]) for run in plan.runs}
    return compare_runs(plan, measured, log)


def cache_predictions(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    compute: ComputeConfig = ComputeConfig(),
    progress: EvaluationProgress = lambda done, total, task: None,
) -> None:
    """Compute the predictions and maps that `evaluate_runs` with the same arguments needs, and no metrics."""
    compute_predictions(plan_evaluation(folders, protocol), compute, progress)


def plan_evaluation(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol,
    *,
    data: DataSet | None = None,
    log: Log = lambda text: None,
) -> EvaluationPlan:
    """Read the runs and prepare their test sets, which must be the same for all."""
    if not folders:
        raise ValueError("Give at least one run to evaluate.")
    runs = [read_run(folder) for folder in folders]
    own = runs[0].data() if data is None else data
    splits = own.load()
    if data is None:
        _check_same_test_set(runs, splits)
    test_sets = all_test_sets(splits, own, protocol, log)
    mapped = images_to_map(test_sets, protocol) if are_images(splits.test) else {}
    return EvaluationPlan(runs, splits, own, test_sets, mapped)


def compute_predictions(plan: EvaluationPlan, compute: ComputeConfig, progress: EvaluationProgress) -> None:
    """Compute and cache the predictions and maps that are missing."""
    names = _names(plan.runs)
    tasks = [task for run in plan.runs for task in _missing(Predictor(run, compute), names[str(run)], plan)]
    total, before, finished, count = sum(task.size for task in tasks), 0, 0, len(tasks)
    try:
        while tasks:
            task = tasks.pop(0)  # frees the ensemble after the last task of its run
            done = before
            progress(done, total, task.title)

            def tick(more: int, title: str = task.title) -> None:
                nonlocal done
                done += more
                progress(done, total, title)

            task.run(tick)
            before, finished = before + task.size, finished + 1  # also counts unreadable examples
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            f"stopped; {finished} of {count} tasks are cached, and the same command resumes from there."
        ) from interrupt


def measure_run(run: TrainedRun, plan: EvaluationPlan, name: str) -> MeasuredRun:
    """Compute all metrics of a run from its cached predictions. `name` identifies it in the results."""
    clean = load_predictions(run, plan.test_sets[0])
    maps = {kind: found for kind, sets in plan.mapped.items() if (found := load_maps(run, kind, sets)) is not None}
    predictions = RunPredictions(
        clean=SetPredictions(lambda: (clean.log_probs, clean.labels)),
        views={s.label: _set_predictions(run, s) for s in plan.test_sets if s.kind == "view"},
        corrupted=_by_severity({s.label: _set_predictions(run, s) for s in plan.test_sets if s.kind == "corrupted"}),
        ood={s.label: _set_predictions(run, s) for s in plan.test_sets if s.kind == "ood"},
        maps={kind: found.maps for kind, found in maps.items()},
    )
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
    return MeasuredRun(result, MemberVotes.of(clean), maps.get("clean"))


def compare_runs(plan: EvaluationPlan, measured: dict[str, MeasuredRun], log: Log = lambda text: None) -> Evaluation:
    """Results of runs that have been measured; `measured` is by str(run)."""
    groups = group_runs(plan.runs, plan.titles)
    runs = {name: each.result for name, each in measured.items()}
    compared = compare(groups, runs)
    remarks = notes(list(runs.values()), compared, len(plan.test_sets[0].positions))
    for remark in remarks:
        log(remark)
    several = [group for group in groups if measured[str(group.runs[0])].result.members > 1]
    votes = {group.title: measured[str(group.runs[0])].votes for group in several}
    disputed, images = disputed_examples(votes, plan.splits.test)
    figure, drawn = cam_figure(_maps(_baseline_first(several, compared), measured), plan.splits.test)
    results = EvaluationResults(
        data=type(plan.data).__name__,
        classes=plan.splits.classes,
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
    )
    return Evaluation(results, images | drawn)


def _names(runs: list[TrainedRun]) -> dict[str, str]:
    """Short names of runs: the last part of their paths, or as many parts as distinguish them."""
    parts = [run.folder.path.absolute().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(runs) and depth < max(map(len, parts)):
        depth += 1
    return {str(run): "/".join(part[-depth:]) for run, part in zip(runs, parts, strict=True)}


def _check_same_test_set(runs: list[TrainedRun], splits: Splits) -> None:
    first = runs[0].recipe["data"]
    for run in runs[1:]:
        other = run.recipe["data"]
        if other != first and run.data().load().test.identity() != splits.test.identity():
            raise ValueError(
                f"{runs[0]} and {run} have different test sets "
                f"({'; '.join(recipe_differences(first, other, 'data'))}); evaluate them separately."
            )


class _Task(NamedTuple):
    """Predictions or maps to compute and cache."""

    title: str
    size: int
    """Number of examples."""
    run: Callable[[Tick], None]


def _missing(predictor: Predictor, name: str, plan: EvaluationPlan) -> list[_Task]:
    tasks = []
    for test_set in plan.test_sets:
        if not has_predictions(predictor.run, test_set):
            run = partial(_predict, predictor, test_set)
            tasks.append(_Task(f"{name}: {test_set.name}", len(test_set.positions), run))
    for kind, chosen in plan.mapped.items():
        if not has_maps(predictor.run, kind, chosen) and has_convolutions(predictor):
            size = sum(len(test_set.positions) for test_set in chosen)
            tasks.append(_Task(f"{name}: maps, {kind}", size, partial(store_maps, predictor, kind, chosen)))
    return tasks


def _predict(predictor: Predictor, test_set: EvaluationSet, tick: Tick) -> None:
    store_predictions(predictor.run, test_set, predict(predictor, test_set, tick))


def _set_predictions(run: TrainedRun, test_set: EvaluationSet) -> SetPredictions:
    def load() -> tuple[Tensor, Tensor]:
        found: Predictions = load_predictions(run, test_set)
        return found.log_probs, found.labels

    return SetPredictions(load)


def _by_severity(sets: dict[str, SetPredictions]) -> dict[str, dict[str, SetPredictions]]:
    found: dict[str, dict[str, SetPredictions]] = {}
    for label, predictions in sets.items():
        corruption, _, severity = label.rpartition("-")
        found.setdefault(corruption, {})[severity] = predictions
    return found


def _baseline_first(groups: list[RunGroup], compared: list[GroupResult]) -> list[RunGroup]:
    baseline = next((group.baseline for group in compared if group.baseline is not None), None)
    return sorted(groups, key=lambda group: group.title != baseline)


def _maps(groups: list[RunGroup], measured: dict[str, MeasuredRun]) -> list[tuple[str, int, CachedMaps]]:
    found = [(group.title, group.runs[0].seed, measured[str(group.runs[0])].maps) for group in groups]
    return [(title, seed, maps) for title, seed, maps in found if maps is not None]
