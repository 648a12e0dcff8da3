"""From folders of runs to one dictionary of results: predictions where they are missing, then metrics, then means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from featureflock.data import DataSet, Splits
from featureflock.evaluation import test_sets
from featureflock.evaluation.cam_cache import (
    CachedMaps,
    Which,
    can_map,
    has_maps,
    map_pictures,
    pictures_to_map,
    read_maps,
)
from featureflock.evaluation.images import are_pictures
from featureflock.evaluation.predictions import Predictor, Tick, has_predictions, predict, store_predictions
from featureflock.evaluation.run_metrics import compare, measure_run, remarks
from featureflock.evaluation.runs import RunGroup, TrainedRun, read_run, settings
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet
from featureflock.training.compute import ComputeConfig
from featureflock.training.recipe import recipe_differences
from featureflock.utils.provenance import provenance

EvaluationProgress = Callable[[int, int, str], None]
"""Is told how many examples are done, of how many, and what is being done."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` gives."""

    results: dict[str, Any]
    """All numbers, as they go into results.json."""
    settings: list[RunGroup]
    splits: Splits
    conditions: list[EvaluationSet]
    """The clean test set first."""
    mapped: dict[Which, list[EvaluationSet]]
    """The pictures whose class activation maps were computed, if any."""

    def maps(self, run: TrainedRun, which: Which = "clean") -> CachedMaps | None:
        """A run's class activation maps, if it has any."""
        return read_maps(run, which, self.mapped[which]) if which in self.mapped else None


def evaluate(
    runs: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    data: DataSet | None = None,
    compute: ComputeConfig = ComputeConfig(),
    progress: EvaluationProgress = lambda done, total, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Measure runs on everything there is, and compare them.

    Args:
        runs: folders of finished runs, of one data set: methods × seeds. Runs that differ by their seed alone are
            averaged; differences from Deep Ensembles are paired by seed.
        protocol: what to test on.
        data: the data set, where the runs were trained on data of your own.
        compute: how to compute; only device, memory format and `run` matter here.
        progress, say: told what happens meanwhile.

    Predictions are kept beside each run, so that nothing is computed twice.
    """
    if not runs:
        raise ValueError("Give at least one run to evaluate.")
    work = _prepare(runs, protocol, data, compute, say)
    trained, splits, name, conditions, mapped = work.runs, work.splits, work.name, work.conditions, work.mapped
    rows, names = work.rows, work.names
    _carry_out(work.missing(), progress)
    say(f"Computing metrics of {len(trained)} run{'s' * (len(trained) > 1)} on {len(conditions)} test sets.")
    measured = {str(run): measure_run(run, names[str(run)], conditions, mapped) for run in trained}
    entries = list(measured.values())
    compared = compare(rows, measured)
    sources = dict.fromkeys(condition.source for condition in conditions if condition.source)
    notes = remarks(entries, asked=len(conditions[0].positions))
    if len(rows) > 1 and not any(row.get("differences") for row in compared):
        notes.append("There are no Deep Ensembles that share a seed with another setting, so there are no differences.")
    for note in notes:
        say(note)
    results = {
        "data": name,
        "classes": splits.classes,
        "class_names": list(splits.class_names),
        "examples": entries[0]["clean"]["examples"],
        "conditions": [condition.name for condition in conditions],
        "notes": [*sources, *notes],
        "runs": entries,
        "settings": compared,
        "provenance": provenance(),
    }
    return Evaluation(results, rows, splits, conditions, mapped)


def cache_predictions(
    runs: Sequence[Path | str],
    protocol: EvaluationProtocol = EvaluationProtocol(),
    *,
    compute: ComputeConfig = ComputeConfig(),
    progress: EvaluationProgress = lambda done, total, what: None,
) -> None:
    """Compute the predictions and maps that `evaluate` with the same arguments needs, and no metrics."""
    _carry_out(_prepare(runs, protocol, None, compute, lambda text: None).missing(), progress)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Runs and test sets of an evaluation."""

    runs: list[TrainedRun]
    rows: list[RunGroup]
    names: dict[str, str]
    splits: Splits
    name: str
    conditions: list[EvaluationSet]
    mapped: dict[Which, list[EvaluationSet]]
    compute: ComputeConfig

    def missing(self) -> "list[_Job]":
        predictors = {self.names[str(run)]: Predictor(run, self.compute) for run in self.runs}
        return _missing(predictors, self.conditions, self.mapped)


def _prepare(
    runs: Sequence[Path | str],
    protocol: EvaluationProtocol,
    data: DataSet | None,
    compute: ComputeConfig,
    say: Callable[[str], None],
) -> _Prepared:
    trained = [read_run(folder) for folder in runs]
    rows = settings(trained)
    splits, name = _splits(trained, data)
    conditions = [
        test_sets.clean(splits, protocol),
        *test_sets.single_views(splits, protocol),
        *test_sets.corrupted(splits, name, protocol, say),
        *test_sets.unfamiliar(splits, name, protocol),
    ]
    mapped = pictures_to_map(conditions, protocol) if are_pictures(splits.test) else {}
    return _Prepared(trained, rows, _names(trained), splits, name, conditions, mapped, compute)


def _names(runs: list[TrainedRun]) -> dict[str, str]:
    """What to call runs: the last part of their paths, or as many parts as tell them apart."""
    parts = [run.folder.path.absolute().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(runs) and depth < max(map(len, parts)):
        depth += 1
    return {str(run): "/".join(part[-depth:]) for run, part in zip(runs, parts, strict=True)}


def _splits(runs: list[TrainedRun], data: DataSet | None) -> tuple[Splits, str]:
    """The data that all runs were trained on, and the name of their class."""
    if data is not None:
        return data.load(), type(data).__name__
    first, *others = (run.recipe["data"] for run in runs)
    splits = runs[0].data().load()
    for run, other in zip(runs[1:], others, strict=True):
        if other != first and run.data().load().test.identity() != splits.test.identity():
            raise ValueError(
                f"{runs[0]} and {run} have different test sets "
                f"({'; '.join(recipe_differences(first, other, 'data'))}); evaluate them separately."
            )
    return splits, str(first["class"])


class _Job(NamedTuple):
    """Something to compute and keep."""

    what: str
    size: int
    """In examples."""
    do: Callable[[Tick], None]


def _missing(
    predictors: dict[str, Predictor], conditions: list[EvaluationSet], mapped: dict[Which, list[EvaluationSet]]
) -> list[_Job]:
    jobs = []
    for name, predictor in predictors.items():
        for condition in conditions:
            if not has_predictions(predictor.run, condition):
                do = partial(_predict, predictor, condition)
                jobs.append(_Job(f"{name}: {condition.name}", len(condition.positions), do))
        for which, chosen in mapped.items():
            if not has_maps(predictor.run, which, chosen) and can_map(predictor):
                size = sum(len(condition.positions) for condition in chosen)
                jobs.append(_Job(f"{name}: maps, {which}", size, partial(map_pictures, predictor, which, chosen)))
    return jobs


def _predict(predictor: Predictor, condition: EvaluationSet, tick: Tick) -> None:
    store_predictions(predictor.run, condition, predict(predictor, condition, tick))


def _carry_out(jobs: list[_Job], progress: EvaluationProgress) -> None:
    total, before, finished = sum(job.size for job in jobs), 0, 0
    try:
        for job in jobs:
            done = before
            progress(done, total, job.what)

            def tick(more: int, what: str = job.what) -> None:
                nonlocal done
                done += more
                progress(done, total, what)

            job.do(tick)
            before, finished = before + job.size, finished + 1  # also those that cannot be read
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            f"stopped; {finished} of {len(jobs)} pieces of work are kept, and the same command goes on from there."
        ) from interrupt
