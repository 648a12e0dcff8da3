"""Evaluate run folders: compute missing predictions, then metrics, then comparisons.

    evaluation = evaluate_runs(["runs/a", "runs/b"], EvaluationProtocol(severities=(3,)))
    evaluation.results.groups[0].metrics["nll"].mean

Predictions are cached in the run folders, so that an interrupted evaluation resumes and nothing is computed twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from featureflock.data import DataSet
from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation import cam_cache
from featureflock.evaluation.cam_cache import CachedMaps
from featureflock.evaluation.choose_calibration import choose_calibrations
from featureflock.evaluation.comparison import ComparedGroup, compare, notes
from featureflock.evaluation.compute_predictions import EvaluationProgress, compute_predictions
from featureflock.evaluation.endpoints import default_endpoints
from featureflock.evaluation.gallery import Images, MemberVotes, VotedSet, disputed_examples, draw_cam_figure
from featureflock.evaluation.measure import measure
from featureflock.evaluation.plan import EvaluationPlan, plan_by_data, plan_evaluation, read_runs
from featureflock.evaluation.predictions import load_predictions
from featureflock.evaluation.results import EvaluationResults, RunResult, TestSetInfo
from featureflock.evaluation.run_predictions import Calibration, RunPredictions, SetPredictions, cross_validation
from featureflock.evaluation.runs import TrainedRun, group_runs, recipe_fields
from featureflock.evaluation.test_sets import EvaluationProtocol, Log, has_one_class
from featureflock.tasks import Classification
from featureflock.training.compute import ComputeConfig
from featureflock.utils.provenance import provenance


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of an evaluation, and the images that they refer to. Together they are all that a report needs."""

    results: EvaluationResults
    images: Images
    """PNG files by name."""


class MeasuredRun(NamedTuple):
    """All numbers of a run, and its maps on the clean test set."""

    result: RunResult
    maps: CachedMaps | None


def evaluate_runs(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    data: DataSet | None = None,
    titles: Sequence[str] = (),
    sizes: Sequence[int] = (),
    endpoints: Sequence[str] | None = None,
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
        endpoints: keys of metrics whose p-values are corrected for one another, row by row, by Holm's method; by
            default those of the task.
        compute: device, memory format and execution mode.
        progress: called after each batch.
        log: called with messages for the user.
    """
    runs = read_runs(folders, sizes)
    plans = plan_by_data(runs, protocol, data, log)
    for plan in plans:
        compute_predictions(plan, compute, progress)
    log(f"Computing metrics of {len(runs)} run{'s' * (len(runs) > 1)} on {len(plans[0].test_sets)} test sets.")
    calibrations, note = choose_calibrations(plans, protocol.calibration, compute, progress)
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
    compute_predictions(plan, compute, lambda done, total, task: None, load_ensemble)


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
    measured = measure(predictions, name, run.method, run.seed)
    origin = {"training": {**run.result}, "curves": run.curves, "recipe": run.recipe, "environment": run.environment}
    result = replace(measured, **origin)  # type: ignore[arg-type]
    return MeasuredRun(result, maps.get("clean"))


def _compare(
    plans: Sequence[EvaluationPlan],
    read: Sequence[TrainedRun],
    measured: dict[str, MeasuredRun],
    titles: dict[str, str],
    endpoints: Sequence[str] | None,
    log: Log,
    note: str,
) -> Evaluation:
    """Results of runs that have been measured; `measured` and `titles` are by str(run)."""
    plan, groups = plans[0], group_runs(read, titles)
    runs = {name: each.result for name, each in measured.items()}
    rows = [ComparedGroup(g.title, [runs[str(run)] for run in g.runs], recipe_fields(g.runs[0])) for g in groups]
    if endpoints is None:
        endpoints = default_endpoints(plan.splits.task.kind, runs.values())
    compared = [compare(row, rows, endpoints) for row in rows]
    remarks = [note] * bool(note) + [text for each in plans for text in each.data_notes()]
    remarks += notes(list(runs.values()), compared, len(plan.test_sets[0].positions))
    for remark in remarks:
        log(remark)
    shown = {group.title: [run for run in group.runs if str(run) in map(str, plan.runs)] for group in groups}
    firsts = {title: runs[0] for title, runs in shown.items() if runs and measured[str(runs[0])].result.members > 1}
    several = {title: measured[str(run)] for title, run in firsts.items()}
    disputed, images = disputed_examples(_voted_sets(plan, firsts))
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
        endpoints=list(endpoints),
        provenance=provenance(),
        disputed=disputed,
        cam_figure=figure,
        task=plan.splits.task.kind,
        dense=plan.splits.task.kind == Classification.kind and plan.splits.test.labels.ndim > 1,
    )
    return Evaluation(results, images | drawn)


def _voted_sets(plan: EvaluationPlan, runs: Mapping[str, TrainedRun]) -> Iterator[VotedSet]:
    """Each test set with the cached predictions of these runs, which are by title."""
    for test_set in plan.test_sets if has_one_class(plan.splits) else []:
        votes = partial(
            lambda each: {title: MemberVotes.of(load_predictions(run, each)) for title, run in runs.items()}, test_set
        )
        yield VotedSet(test_set.kind, test_set.label, votes, test_set.load)


def _data_name(data: DataSet) -> str:
    """CIFAR10, or HeldOut CIFAR10 for a data set that wraps another."""
    wrapped = [_data_name(part) for part in vars(data).values() if isinstance(part, DataSet)]
    return " ".join([type(data).__name__, *wrapped])
