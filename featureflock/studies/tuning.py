"""Choose hyper-parameters on held-out examples, within a budget of training runs.

    tuning = tune(Recipe(data=CustomData(train, test), model=CustomModelConfig(MyNetwork)), "tuning", budget=20)
    train(tuning.best, "runs/best")

The search space maps recipe fields to values: {"method.repulsion": (1.0, 5.0), "method.prior.precision": (1e-3, 1e-2)}.
The first candidate has the recipe's own values. If the budget allows it, every combination is trained with every seed.
Otherwise candidates are drawn so that all values of a field are equally frequent (a Latin hypercube), and compared by
successive halving over seeds: c candidates are trained with one seed, the best c/3 with a second, the best c/9 with a
third. A budget of 20 runs and 3 seeds is 13 + 5 + 2 runs. The last candidates are ranked by their mean over all seeds.

Each seed has other held-out examples, which are part of the training set, or of the validation set of a data set that
provides one. The test set is not used. Runs are stored in a folder: a search that was interrupted resumes, and several
processes that are started with the same arguments and folder share the work.
"""

import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from featureflock.data import HeldOut
from featureflock.ensemble.saving import load
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation.evaluate import cache_predictions
from featureflock.evaluation.metrics.registry import METRICS, Metric, find_metric
from featureflock.evaluation.results import RunResult
from featureflock.evaluation.statistics import SeedMean, mean
from featureflock.studies.runner import StudyRun, folder_name, in_processes, with_new_data
from featureflock.studies.search_space import (
    Space,
    canonical,
    count_candidates,
    default_space,
    draw_candidates,
    rounds,
    with_values,
)
from featureflock.studies.study import Row
from featureflock.tasks import Classification
from featureflock.training import ComputeConfig, Recipe, Reporter, train
from featureflock.training.build import build
from featureflock.training.run_folder import RunFolder, RunLockedError
from featureflock.training.validation import DivergenceError
from featureflock.utils.files import write_atomically
from featureflock.utils.progress import ProgressCallback, no_progress

FIRST_SEED, _POLL_SECONDS = 100, 1.0
"""Added to the recipe's seed, so that later comparisons with seeds 0, 1, … share none with the search."""
_DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Candidate:
    """One point of the search space."""

    values: dict[str, Any]
    """By recipe field."""
    recipe: Recipe
    """The recipe with these values, on all training examples."""
    results: dict[int, RunResult]
    """By seed, on the held-out examples."""
    diverged: bool = False
    """Whether a training run ended with a loss that is not finite."""

    @property
    def title(self) -> str:
        return (
            ", ".join(f"{field.split('.')[-1]} {_text(value)}" for field, value in self.values.items()) or "unchanged"
        )

    def mean(self, key: str) -> SeedMean:
        """Mean of a metric over the seeds."""
        return mean([result.summary[key] for result in self.results.values()])


@dataclass(frozen=True)
class Tuning:
    """Result of a search."""

    candidates: list[Candidate]
    """The best first: those with the most seeds, ranked by the metric, then those that were eliminated earlier."""
    metric: Metric
    """What the candidates are ranked by."""
    space: dict[str, tuple[Any, ...]]
    notes: list[str]
    """Remarks on the choice, such as a value at the end of its range."""

    @property
    def best(self) -> Recipe:
        """The recipe to train on all training examples."""
        return self.candidates[0].recipe

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "method": self.best.method.title,
            "by": self.metric.key,
            "space": {field: list(values) for field, values in self.space.items()},
            "notes": self.notes,
            "candidates": [
                {
                    "values": candidate.values,
                    "diverged": candidate.diverged,
                    "seeds": {str(seed): result.summary for seed, result in candidate.results.items()},
                }
                for candidate in self.candidates
            ],
        }


def tune(
    recipe: Recipe,
    folder: Path | str,
    *,
    space: Space | None = None,
    budget: int = 20,
    seeds: int = 3,
    by: str = "nll",
    accuracy_tolerance: float | None = None,
    held_out: int | None = None,
    corrupted_examples: int | None = None,
    workers: int = 1,
    compute: ComputeConfig = ComputeConfig(),
    reporter: Callable[[], Reporter] = Reporter,
    progress: ProgressCallback = no_progress,
    log: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Search for the best values of some recipe fields on held-out examples.

        tuning = tune(recipe, "tuning", budget=20)
        tuning.best.method                            # FeatureWGD(prior=Cauchy(0.003), rank=2, repulsion=5.0)

    Args:
        recipe: what to tune. Its data set may be `CustomData`, its model a `CustomModelConfig`.
        folder: folder for the runs; finished runs in it are not trained again.
        space: values to try by field; by default those of the method: `default_space(recipe)`.
        budget: largest number of training runs.
        seeds: number of seeds of the last candidates, from 100 + recipe.seed on; 1 to train every candidate once.
        by: key of the metric that ranks candidates, on the held-out examples.
        accuracy_tolerance: candidates whose accuracy is lower than the best by more than this fraction are not chosen.
        held_out: number of held-out examples; by default a fifth of the training set, at most 5,000.
        corrupted_examples: number of held-out examples in each of the 75 corrupted sets. By default these are evaluated
            only if the metric needs them, with all held-out examples.
        workers: number of processes that train runs in parallel.
        compute: device and other options that do not change the mathematics.
        reporter: makes the reporter of a run; used with one worker only.
        progress: called with the number of finished runs, of all runs, and the last one; used with several workers.
        log: called with one-line messages.
    """
    metric = ranking_metric(by, recipe.data.task.kind)
    if accuracy_tolerance is not None and recipe.data.task.kind != Classification.kind:
        raise ValueError("accuracy_tolerance is for classification only; leave it out.")
    if recipe.split_seed:
        raise ValueError("tune holds out other examples for each seed; leave split_seed at 0.")
    chosen = {canonical(field): tuple(values) for field, values in (space or default_space(recipe)).items()}
    data = HeldOut(recipe.data, _held_out_count(recipe) if held_out is None else held_out, recipe.split_seed)
    points = count_candidates(recipe, chosen)
    counts = rounds(points, budget, seeds)
    drawn = draw_candidates(recipe, chosen, counts[0])
    candidates = [Candidate(values, with_values(recipe, values), {}) for values in drawn]
    log(f"{recipe.method.title}: {counts[0]} of {points} candidates, {' + '.join(map(str, counts))} runs.")
    protocol = _protocol(metric, corrupted_examples)
    finish = partial(_finish, protocol=protocol, compute=compute, workers=workers, reporter=reporter)
    eliminated: list[Candidate] = []
    notes: list[str] = []
    for round_, count in enumerate(counts):
        candidates, eliminated = candidates[:count], [*candidates[count:], *eliminated]
        seed = FIRST_SEED + recipe.seed + round_
        runs = [_run(candidate, data, seed, Path(folder)) for candidate in candidates]
        log(f"Round {round_ + 1} of {len(counts)}: {count} candidates with seed {seed}.")
        finish(runs, progress=progress, log=log)
        candidates = _with_results(candidates, runs, protocol, compute)
        ranked_by, note = reliable_metric([r for c in candidates for r in c.results.values()], metric)
        candidates = rank(candidates, ranked_by, accuracy_tolerance)
        notes = [note] * bool(note)
    if candidates[0].diverged:
        raise ValueError(f"Every candidate of {recipe.method.title} diverged; lower the learning rate.")
    notes += _end_of_range(candidates[0], chosen)
    return Tuning([*candidates, *eliminated], ranked_by, chosen, notes)


def ranking_metric(key: str, task: str = Classification.kind) -> Metric:
    """The metric with this key, if it can rank candidates of this kind of task."""
    metric = find_metric(key)
    if task not in metric.tasks:
        raise ValueError(f"{key} does not apply to {task}; choose another metric, such as nll.")
    if "{}" in metric.key:
        raise ValueError(f"{key} is a family of metrics; give a name in place of {{}}, as in auroc_noise.")
    if metric.group == "ood":
        raise ValueError(f"Candidates are not evaluated on OOD sets, so they cannot be ranked by {key}.")
    if not metric.better:
        directed = [k for k, entry in METRICS.items() if entry.better and entry.parts is None and task in entry.tasks]
        raise ValueError(f"{key} cannot rank candidates; choose one of {', '.join(directed)}.")
    return metric


def reliable_metric(results: Sequence[RunResult], metric: Metric) -> tuple[Metric, str]:
    """The metric to rank by and, if it is not the given one, why.

    Where a fitted temperature is at its bound, the calibrated value depends on that bound, and the uncalibrated one is
    used.
    """
    at_bound = sum(result.temperature_at_bound(metric.key) for result in results) if metric.uncalibrated else 0
    if not at_bound:
        return metric, ""
    return METRICS[metric.uncalibrated], (
        f"The temperature of {at_bound} of {len(results)} runs is at its bound, so {metric.key} after temperature "
        f"scaling is not reliable; candidates are ranked by {metric.uncalibrated} instead."
    )


def rank(candidates: Sequence[Candidate], metric: Metric, accuracy_tolerance: float | None = None) -> list[Candidate]:
    """The candidates, the best mean first; those that are too inaccurate, and those that diverged, come last."""
    valid = [c for c in candidates if not c.diverged]
    if any(metric.key not in r.summary for c in valid for r in c.results.values()):
        raise ValueError(f"{metric.key} has no value for some candidates; choose another metric.")
    top = max((c.mean("accuracy").mean for c in valid), default=0.0) if accuracy_tolerance is not None else 0.0

    def key(candidate: Candidate) -> tuple[bool, float]:
        value = candidate.mean(metric.key).mean
        too_low = accuracy_tolerance is not None and candidate.mean("accuracy").mean < top - accuracy_tolerance
        return too_low, -value if metric.better == "higher" else value

    return [*sorted(valid, key=key), *(c for c in candidates if c.diverged)]


def _held_out_count(recipe: Recipe) -> int:
    splits = recipe.data.load()
    if splits.validation is not None:
        return len(splits.validation)
    return min(5_000, len(splits.train) // 5)


def _protocol(metric: Metric, corrupted_examples: int | None) -> EvaluationProtocol:
    needed = metric.group in ("corrupted", "severity") or "corrupted" in metric.key
    if needed or corrupted_examples is not None:
        return EvaluationProtocol(corrupted_examples=corrupted_examples, ood=(), maps=0)
    return EvaluationProtocol(corruptions=(), ood=(), maps=0)


def _run(candidate: Candidate, data: HeldOut, seed: int, folder: Path) -> StudyRun:
    recipe = with_new_data(replace(candidate.recipe, data=data), seed)
    return StudyRun(Row(candidate.title, recipe), recipe, recipe.size, folder / folder_name(recipe))


def _is_done(run: StudyRun) -> bool:
    return run.is_finished or (run.folder / _DIVERGED).is_file()


def _finish(
    runs: Sequence[StudyRun],
    *,
    protocol: EvaluationProtocol,
    compute: ComputeConfig,
    workers: int,
    reporter: Callable[[], Reporter],
    progress: ProgressCallback,
    log: Callable[[str], None],
) -> None:
    """Train the runs that are not finished, and wait for those that other processes are training."""
    complete = partial(_complete, protocol=protocol, compute=compute)
    waiting, completed = False, set[Path]()
    while queue := [run for run in runs if not _is_done(run)]:
        if workers > 1 and len(queue) > 1:
            _check_picklable(queue[0])
            in_processes(complete, queue, min(workers, len(queue)), progress)
        else:
            for run in queue:
                log(f"{run}: {run.folder}")
                if complete(run, reporter()):
                    completed.add(run.folder)
        if any(not _is_done(run) for run in runs):
            if not waiting:
                log("Waiting for runs that other processes are training.")
            waiting = True
            time.sleep(_POLL_SECONDS)
    for run in runs:
        if run.is_finished and run.folder not in completed:  # by another process, perhaps without these predictions
            complete(run, Reporter())


def _complete(run: StudyRun, reporter: Reporter, protocol: EvaluationProtocol, compute: ComputeConfig) -> bool:
    """Train the run and cache its predictions; False if another process is training it."""
    try:
        if not run.is_finished:
            train(run.recipe, run.folder, compute=compute, resume=True, reporter=reporter)
    except RunLockedError:
        return False
    except DivergenceError as error:
        write_atomically(run.folder / _DIVERGED, json.dumps({"error": str(error)}).encode())
        return True
    cache_predictions([run.folder], protocol, compute, data=run.recipe.data, load_ensemble=partial(_load, run))
    return True


def _load(run: StudyRun) -> Any:
    """The trained ensemble, built by the recipe itself, so that its model may be any function."""
    return load(RunFolder(run.folder).ensemble, into=build(run.recipe, run.recipe.splits()))


def _with_results(
    candidates: Sequence[Candidate],
    runs: Sequence[StudyRun],
    protocol: EvaluationProtocol,
    compute: ComputeConfig,
) -> list[Candidate]:
    """The candidates with the results of one more run each."""
    finished = [run for run in runs if run.is_finished]
    results: dict[Path, RunResult] = {}
    if finished:
        folders = [run.folder for run in finished]
        data = finished[0].recipe.data  # the same for all, as they have the same seed
        evaluated = evaluate_runs(folders, protocol, data=data, compute=compute).results
        results = dict(zip(folders, evaluated.runs, strict=True))
    updated = []
    for candidate, run in zip(candidates, runs, strict=True):
        one = {run.recipe.seed: results[run.folder]} if run.folder in results else {}
        updated.append(
            replace(candidate, results=candidate.results | one, diverged=candidate.diverged or not run.is_finished)
        )
    return updated


def _check_picklable(run: StudyRun) -> None:
    try:
        pickle.dumps(run)
    except Exception as error:
        what = "The recipe cannot be sent to other processes"
        raise ValueError(f"{what} ({error}); define its functions at the top of a module, or use workers=1.") from error


def _end_of_range(best: Candidate, space: Space) -> list[str]:
    notes = []
    for field, values in space.items():
        numbers = [v for v in values if isinstance(v, int | float)]
        if len(numbers) > 2 and best.values[field] in (min(numbers), max(numbers)):
            end = "smallest" if best.values[field] == min(numbers) else "largest"
            notes.append(f"The best {field.split('.')[-1]} is the {end} one tried; try values beyond it.")
    return notes


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
