"""Evaluate run folders: compute missing predictions, then metrics, then comparisons.

    evaluation = evaluate_runs(["runs/a", "runs/b"], EvaluationProtocol(severities=(3,)))
    evaluation.results.groups[0].metrics["nll"].mean

Predictions are cached in the run folders, so that an interrupted evaluation resumes and nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from featureflock.data import DataSet, Splits
from featureflock.evaluation import cam_cache
from featureflock.evaluation import predictions as cache
from featureflock.evaluation.cam_cache import CachedMaps, MapKind
from featureflock.evaluation.comparison import compare, notes
from featureflock.evaluation.gallery import Images, MemberVotes, disputed_examples, draw_cam_figure
from featureflock.evaluation.images import are_images
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.predictions import ExampleCallback, Predictor, load_predictions
from featureflock.evaluation.results import EvaluationResults, RunResult, TestSetInfo
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions
from featureflock.evaluation.runs import TrainedRun, group_runs, read_run
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet, Log, all_test_sets, has_one_class
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
        protocol: the test sets to use.
        data: the data set, if the runs were trained on custom data.
        titles: row title of each run; by default its method and what tells groups of one method apart.
        compute: device, memory format and execution mode.
        progress: called after each batch.
        log: called with messages for the user.
    """
    plan = plan_evaluation(folders, protocol, data, log)
    _compute_predictions(plan, compute, progress)
    log(f"Computing metrics of {len(plan.runs)} run{'s' * (len(plan.runs) > 1)} on {len(plan.test_sets)} test sets.")
    measured = {str(run): measure_run(run, plan, name) for run, name in zip(plan.runs, plan.names, strict=True)}
    return _compare(plan, measured, dict(zip(map(str, plan.runs), titles, strict=True)) if titles else {}, log)


def cache_predictions(folders: Sequence[Path | str], protocol: EvaluationProtocol, compute: ComputeConfig) -> None:
    """Compute the predictions and maps that `evaluate_runs` with the same arguments needs, and no metrics."""
    _compute_predictions(plan_evaluation(folders, protocol), compute, lambda done, total, task: None)


def plan_evaluation(
    folders: Sequence[Path | str], protocol: EvaluationProtocol, data: DataSet | None = None, log: Log = lambda _: None
) -> EvaluationPlan:
    """Read the runs and prepare their test sets, which must be the same for all."""
    if not folders:
        raise ValueError("Give at least one run to evaluate.")
    runs = [read_run(folder) for folder in folders]
    data_set = runs[0].data() if data is None else data
    splits = data_set.load()
    for run in runs[1:] if data is None else []:
        first, other = runs[0].recipe["data"], run.recipe["data"]
        if other != first and run.data().load().test.identity() != splits.test.identity():
            what = "; ".join(recipe_differences(first, other, "data"))
            raise ValueError(f"{runs[0]} and {run} have different test sets ({what}); evaluate them separately.")
    test_sets = all_test_sets(splits, data_set, protocol, log)
    one_class = has_one_class(splits)
    mapped = cam_cache.images_to_map(test_sets, protocol) if one_class and are_images(splits.test) else {}
    return EvaluationPlan(runs, splits, data_set, test_sets, mapped, _names(runs))


def measure_run(run: TrainedRun, plan: EvaluationPlan, name: str) -> MeasuredRun:
    """Compute all metrics of a run from its cached predictions. `name` identifies it in the results."""
    clean = load_predictions(run, plan.test_sets[0])
    maps = {kind: cached for kind, sets in plan.mapped.items() if (cached := cam_cache.load_maps(run, kind, sets))}
    views, ood, corrupted = {}, {}, dict[str, dict[str, SetPredictions]]()
    for test_set in plan.test_sets:
        lazy = SetPredictions(partial(lambda each: load_predictions(run, each)[:2], test_set), plan.splits.task)
        match test_set.kind:
            case "view":
                views[test_set.label] = lazy
            case "ood":
                ood[test_set.label] = lazy
            case "corrupted":
                corruption, _, severity = test_set.label.rpartition("-")
                corrupted.setdefault(corruption, {})[severity] = lazy
    on_clean = SetPredictions(lambda: (clean.log_probs, clean.labels), plan.splits.task)
    predictions = RunPredictions(on_clean, views, corrupted, ood, {kind: cached.maps for kind, cached in maps.items()})
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


def _compute_predictions(plan: EvaluationPlan, compute: ComputeConfig, progress: EvaluationProgress) -> None:
    """Compute and cache the predictions and maps that are missing."""
    pairs = zip(plan.runs, plan.names, strict=True)
    tasks = [task for run, name in pairs for task in _missing(Predictor(run, compute), name, plan)]
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
    tasks: list[_Task] = []
    for test_set in plan.test_sets:
        if not cache.has_predictions(predictor.run, test_set):
            run = partial(_predict, predictor, test_set)
            tasks.append((f"{name}: {test_set.name}", len(test_set.positions), run))
    for kind, chosen in plan.mapped.items():
        if cam_cache.load_maps(predictor.run, kind, chosen) is None and cam_cache.has_convolutions(predictor):
            run = partial(cam_cache.store_maps, predictor, kind, chosen)
            tasks.append((f"{name}: maps, {kind}", sum(len(test_set.positions) for test_set in chosen), run))
    return tasks


def _predict(predictor: Predictor, test_set: EvaluationSet, tick: ExampleCallback) -> None:
    cache.store_predictions(predictor.run, test_set, cache.predict(predictor, test_set, tick))


def _compare(plan: EvaluationPlan, measured: dict[str, MeasuredRun], titles: dict[str, str], log: Log) -> Evaluation:
    """Results of runs that have been measured; `measured` and `titles` are by str(run)."""
    groups = group_runs(plan.runs, titles)
    runs = {name: each.result for name, each in measured.items()}
    compared = [compare(group, groups, runs) for group in groups]
    for remark in (remarks := notes(list(runs.values()), compared, len(plan.test_sets[0].positions))):
        log(remark)
    firsts = {group.title: measured[str(group.runs[0])] for group in groups}
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


def _names(runs: list[TrainedRun]) -> list[str]:
    """Short names of runs: the last part of their paths, or as many parts as are needed to tell them apart."""
    parts, depth = [run.folder.path.absolute().parts for run in runs], 1
    while len({part[-depth:] for part in parts}) < len(runs) and depth < max(map(len, parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _data_name(data: DataSet) -> str:
    """CIFAR10, or HeldOut CIFAR10 for a data set that wraps another."""
    wrapped = [_data_name(part) for part in vars(data).values() if isinstance(part, DataSet)]
    return " ".join([type(data).__name__, *wrapped])
