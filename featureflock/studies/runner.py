"""Run a study: train its runs, cache their predictions, compute the metrics, and compare them with the paper's numbers.

A run is one row of a study with one seed. Its folder is named after its recipe, so studies that share a recipe share
its runs. Finished runs are not trained again, and interrupted ones are resumed. Several workers may share a folder, on
one machine or on machines with a common file system: each starts with the runs of its shard, then helps with the rest.
A run that is being trained is locked (flock), and the other workers skip it.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from featureflock.data import DataSet
from featureflock.evaluation import Evaluation, EvaluationProtocol, evaluate_runs
from featureflock.evaluation.evaluate import cache_predictions
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.evaluation.results import RunResult
from featureflock.evaluation.statistics import mean, paired_differences
from featureflock.methods import DeepEnsembles
from featureflock.studies.study import Row, Scale, Study
from featureflock.training import ComputeConfig, Recipe, Reporter, train
from featureflock.training.run_folder import RunFolder, RunLockedError
from featureflock.utils.progress import ProgressCallback, no_progress
from featureflock.utils.provenance import provenance


class Shard(NamedTuple):
    """Worker `number`, counted from 1, of `workers`."""

    number: int = 1
    workers: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        number, _, workers = text.partition("/")
        if not (number.isdigit() and workers.isdigit() and 1 <= int(number) <= int(workers)):
            raise ValueError(f"--shard must be a worker's number and the number of workers, such as 3/8; got {text!r}.")
        return cls(int(number), int(workers))


class StudyRun(NamedTuple):
    """One row of a study with one seed."""

    row: Row
    recipe: Recipe
    """The recipe to train."""
    size: int
    """Members used: fewer than are trained where the row is a sub-ensemble of larger Deep Ensembles."""
    folder: Path

    @property
    def is_finished(self) -> bool:
        return RunFolder(self.folder).is_finished

    def __str__(self) -> str:
        return f"{self.row.title}, seed {self.recipe.seed}"


@dataclass(frozen=True)
class StudyStatus:
    """Progress of a study, and its results once every run is finished."""

    runs: list[StudyRun]
    unfinished: list[StudyRun]
    """Runs that other workers are training or have not started."""
    results: dict[str, Any] | None = None
    """`rows`, each with its title, our numbers (mean, sd, seeds), the paper's, the differences from Deep Ensembles,
    paired by seed (mean, interval, p and, for endpoints, p after Holm's correction), and the metrics whose temperature
    is at its bound; `runs` with their numbers; and the provenance."""
    evaluations: tuple[Evaluation, ...] = ()
    """One for each data set."""


def study_runs(
    study: Study, scale: Scale, folder: Path, seeds: int | None = None, first_seed: int = 0
) -> list[StudyRun]:
    """All runs of a study. All rows with the first seed come before those with the second.

    Of Deep Ensembles that differ in size alone, only the largest are trained: the others are their first members, which
    training fewer would have given as well.
    """
    rows, count = study.rows_at(scale), study.seeds_at(scale) if seeds is None else seeds
    runs = []
    for seed in range(first_seed, first_seed + count):
        for row, recipe in rows:
            same = [other for _, other in rows if replace(other, members=recipe.members) == recipe]
            largest = max(same, key=lambda other: other.size) if isinstance(recipe.method, DeepEnsembles) else recipe
            trained = with_new_data(largest, seed) if study.new_subsets else replace(largest, seed=seed)
            runs.append(StudyRun(row, trained, recipe.size, folder / folder_name(trained)))
    return runs


def with_new_data(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with this seed also for the choice of the training data."""
    return replace(recipe, seed=seed, split_seed=seed, data=_with_data_seed(recipe.data, seed))


def _with_data_seed(data: DataSet, seed: int) -> DataSet:
    """The data set, and those that it wraps, with this seed where they have one."""
    changes: dict[str, Any] = {}
    for name in getattr(data, "__dataclass_fields__", {}):
        value = getattr(data, name)
        if isinstance(value, DataSet):
            changes[name] = _with_data_seed(value, seed)
        elif name == "seed":
            changes[name] = seed
    return replace(data, **changes) if changes else data  # type: ignore[type-var]


def to_train(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """One run for each folder, the largest: sub-ensembles of another run are not trained."""
    largest: dict[Path, StudyRun] = {}
    for run in runs:
        if run.folder not in largest or run.size > largest[run.folder].size:
            largest[run.folder] = run
    return list(largest.values())


def run_study(
    study: Study,
    scale: Scale,
    folder: Path,
    *,
    seeds: int | None = None,
    first_seed: int = 0,
    shard: Shard = Shard(),
    workers: int = 1,
    compute: ComputeConfig = ComputeConfig(),
    reporter: Callable[[], Reporter] = Reporter,
    training_progress: ProgressCallback = no_progress,
    progress: ProgressCallback = no_progress,
    log: Callable[[str], None] = lambda text: None,
) -> StudyStatus:
    """Train the missing runs; when all runs are finished, compute their metrics and compare them.

    Args:
        study: what to run.
        scale: smoke, laptop or paper.
        folder: parent of the runs' folders.
        seeds: number of seeds; by default the scale's.
        first_seed: the first seed; the others follow it.
        shard: which worker this is, if several share the folder.
        workers: number of processes that train runs in parallel, each on an equal part of the cores.
        compute: as in `train` and `evaluate`.
        reporter: makes the reporter of a run; used with one worker only.
        training_progress: called with the number of finished runs, of all runs, and the last one; used with several
            workers.
        progress: called during the evaluation, as by `evaluate`.
        log: called with one-line messages.
    """
    runs, protocol = study_runs(study, scale, folder, seeds, first_seed), study.protocol(scale)
    distinct = to_train(runs)
    assigned = distinct[shard.number - 1 :: shard.workers]
    queue = [*assigned, *(run for run in distinct if run not in assigned and not run.is_finished)]
    complete = partial(train_and_predict, protocol=protocol, compute=compute)
    if workers > 1 and any(not run.is_finished for run in queue):
        in_processes(complete, queue, min(workers, len(queue)), training_progress)
    else:
        for run in queue:
            if not run.is_finished:
                log(f"{run}: {run.folder}")
            if not complete(run, reporter()):
                log("Another worker is training it.")
    unfinished = [run for run in distinct if not run.is_finished]
    if unfinished:
        return StudyStatus(runs, unfinished)
    records, evaluations = measure_study(study, runs, protocol, compute, progress=progress, log=log)
    results = study_results(study, scale, runs, records, evaluations[0].results.runs[0].clean.examples)
    return StudyStatus(runs, [], results, tuple(evaluations))


def measure_study(
    study: Study,
    runs: Sequence[StudyRun],
    protocol: EvaluationProtocol,
    compute: ComputeConfig = ComputeConfig(),
    *,
    progress: ProgressCallback = no_progress,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], list[Evaluation]]:
    """Compute the metrics of finished runs: a record for each run, as in `StudyStatus.results["runs"]`."""
    records: dict[int, dict[str, Any]] = {}
    evaluations: list[Evaluation] = []
    for data in dict.fromkeys(_with_data_seed(run.recipe.data, 0) for run in runs):
        group = {i: run for i, run in enumerate(runs) if _with_data_seed(run.recipe.data, 0) == data}
        evaluation = evaluate_runs(
            [run.folder for run in group.values()],
            protocol,
            titles=[run.row.title for run in group.values()],
            sizes=[run.size for run in group.values()],
            endpoints=study.endpoints or None,
            compute=compute,
            progress=progress,
            log=log,
        )
        evaluations.append(evaluation)
        entries = evaluation.results.runs
        records |= {i: _record(run, entry) for (i, run), entry in zip(group.items(), entries, strict=True)}
    return [records[i] for i in range(len(runs))], evaluations


def study_results(
    study: Study, scale: Scale, runs: Sequence[StudyRun], records: Sequence[dict[str, Any]], test_examples: int
) -> dict[str, Any]:
    """The results of a study from the records of its runs, which may have been trained on several machines.

    Runs without a record are left out: their rows have fewer seeds, or are missing.
    """
    return {
        "what": study.title,
        "scale": scale,
        "test_examples": test_examples,
        "corrupted_examples": study.protocol(scale).examples_per_corruption,
        "rows": _compare(study, runs, records),
        "runs": list(records),
        "provenance": provenance(),
    }


def train_and_predict(
    run: StudyRun, reporter: Reporter, protocol: EvaluationProtocol, compute: ComputeConfig = ComputeConfig()
) -> bool:
    """Train the run unless it is finished, and cache its predictions; False if another worker is training it."""
    if not run.is_finished:
        try:
            train(run.recipe, run.folder, compute=compute, resume=True, reporter=reporter)
        except RunLockedError:
            return False
    cache_predictions([run.folder], protocol, compute)
    return True


def in_processes(
    complete: Callable[[StudyRun, Reporter], bool], queue: list[StudyRun], workers: int, progress: ProgressCallback
) -> None:
    """Run `complete(run, Reporter())` for all runs, in spawned processes on an equal part of the cores each."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    others = set(active_children())
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        # Child processes inherit ignored signals: only this process receives Ctrl-C, and it stops the others.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {pool.submit(complete, run, Reporter()): run for run in queue}
        signal.signal(signal.SIGINT, handler)
        try:
            progress(0, len(queue), "training")
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(queue), str(futures[future]))
        except BaseException:
            for process in set(active_children()) - others:
                process.kill()  # a run folder survives that, and the run resumes from its last checkpoint
            raise


def _compare(study: Study, runs: Sequence[StudyRun], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over seeds of each row, and the differences from its Deep Ensembles."""
    by_title: dict[str, dict[int, dict[str, float]]] = {}
    for record in records:
        shown = {key: record["numbers"][key] for key in study.columns if key in record["numbers"]}
        by_title.setdefault(record["title"], {})[record["seed"]] = shown
    rows = []
    first_seed = [run for run in runs if run.recipe.seed == runs[0].recipe.seed]
    for run in (run for run in first_seed if run.row.title in by_title):
        ours = by_title[run.row.title]
        names = [name for name in study.columns if all(name in scored for scored in ours.values())]
        at_bound = {name for record in records if record["title"] == run.row.title for name in record["at_bound"]}
        row: dict[str, Any] = {
            "title": run.row.title,
            "members": run.size,
            "ours": {name: mean([scored[name] for scored in ours.values()])._asdict() for name in names},
            "paper": dict(run.row.paper),
            "at_bound": [name for name in names if name in at_bound],
        }
        if (baseline := _baseline(run, first_seed)) and baseline.row.title in by_title:
            row["against"] = baseline.row.title
            differences = paired_differences(ours, by_title[baseline.row.title], study.endpoints)
            row["differences"] = {name: difference._asdict() for name, difference in differences.items()}
        rows.append(row)
    return rows


def _baseline(run: StudyRun, others: Sequence[StudyRun]) -> StudyRun | None:
    """The Deep Ensembles of the same size and the same recipe otherwise; for one network, of any size."""
    if isinstance(run.recipe.method, DeepEnsembles):
        return None
    wanted = replace(run.recipe, method=DeepEnsembles(), members=None)
    candidates = [other for other in others if replace(other.recipe, members=None) == wanted]
    same_size = [other for other in candidates if other.size == run.size]
    return next(iter(same_size or (candidates if run.size == 1 else [])), None)


def _record(run: StudyRun, entry: RunResult) -> dict[str, Any]:
    result = RunFolder(run.folder).read_result()
    return {
        "folder": run.folder.name,
        "title": run.row.title,
        "seed": run.recipe.seed,
        "members": entry.members,
        "recipe": entry.recipe,
        "numbers": entry.summary,
        "at_bound": [key for key in entry.summary if find_metric(key).uncalibrated and entry.temperature_at_bound(key)],
        "train_accuracy": result["train"].get("accuracy", 0.0) / 100,
        "seconds": result["seconds"],
        "commits": sorted({start.get("commit") or "unknown" for start in entry.environment}),
        "machine": entry.environment[-1].get("machine"),
    }


def folder_name(recipe: Recipe) -> str:
    """The method, a hash of the recipe without its seed, and the seed."""
    content = json.dumps(replace(recipe, seed=0).to_json(), sort_keys=True)
    method = recipe.method.title.lower().replace(" ", "-")
    return f"{method}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-seed{recipe.seed}"
