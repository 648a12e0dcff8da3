"""Compute the predictions and class activation maps that an evaluation needs and that are not cached."""

from collections.abc import Callable, Sequence
from functools import partial

from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation import cam_cache
from featureflock.evaluation import predictions as cache
from featureflock.evaluation.plan import EvaluationPlan
from featureflock.evaluation.predictions import ExampleCallback, Predictor
from featureflock.evaluation.test_sets import EvaluationSet
from featureflock.training.compute import ComputeConfig

EvaluationProgress = Callable[[int, int, str], None]
"""Called with the number of examples done, their total, and the current task."""
Task = tuple[str, int, Callable[[ExampleCallback], None]]
"""Predictions or maps to compute and cache: title, number of examples, function."""


def compute_predictions(
    plan: EvaluationPlan,
    compute: ComputeConfig,
    progress: EvaluationProgress,
    load_ensemble: Callable[[], Ensemble] | None = None,
) -> None:
    """Compute and cache the predictions and maps that are missing."""
    pairs = {run.folder.path: (run, name) for run, name in zip(plan.runs, plan.names, strict=True)}.values()
    predictors = [(Predictor(run, compute, load_ensemble), name) for run, name in pairs]
    run_tasks([task for predictor, name in predictors for task in _missing(predictor, name, plan)], progress)


def run_tasks(tasks: list[Task], progress: EvaluationProgress) -> None:
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


def _missing(predictor: Predictor, name: str, plan: EvaluationPlan) -> list[Task]:
    tasks = missing_predictions(predictor, name, plan.test_sets)
    for kind, chosen in plan.mapped.items():
        if cam_cache.load_maps(predictor.run, kind, chosen) is None and cam_cache.has_convolutions(predictor):
            run = partial(cam_cache.store_maps, predictor, kind, chosen)
            tasks.append((f"{name}: maps, {kind}", sum(len(test_set.positions) for test_set in chosen), run))
    return tasks


def missing_predictions(predictor: Predictor, name: str, test_sets: Sequence[EvaluationSet]) -> list[Task]:
    """A task for each test set without cached predictions; `name` is that of the run."""
    missing = [each for each in test_sets if not cache.has_predictions(predictor.run, each)]
    return [(f"{name}: {each.name}", len(each.positions), partial(_predict, predictor, each)) for each in missing]


def _predict(predictor: Predictor, test_set: EvaluationSet, tick: ExampleCallback) -> None:
    cache.store_predictions(predictor.run, test_set, cache.predict(predictor, test_set, tick))
