"""From folders of runs to one dictionary of results: predictions where they are missing, then metrics, then means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featureflock.data import DataSet, Splits
from featureflock.evaluation import conditions as test_sets
from featureflock.evaluation.conditions import Condition, Protocol
from featureflock.evaluation.measuring import compare, measure_run
from featureflock.evaluation.predictions import Predictor, is_kept, predict
from featureflock.evaluation.runs import Setting, TrainedRun, read_run, settings
from featureflock.provenance import provenance
from featureflock.training.engine import Engine

Progress = Callable[[int, int, str], None]
"""Is told how many examples are done, of how many, and what is being done."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` gives."""

    results: dict[str, Any]
    """All numbers, as they go into results.json."""
    settings: list[Setting]
    splits: Splits
    conditions: list[Condition]
    protocol: Protocol = field(repr=False)


def evaluate(
    runs: Sequence[Path | str],
    protocol: Protocol = Protocol(),
    *,
    data: DataSet | None = None,
    engine: Engine = Engine(),
    progress: Progress = lambda done, total, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Measure runs on everything there is, and compare them.

    Args:
        runs: folders of finished runs, of one data set: methods × seeds. Runs that differ by their seed alone are
            averaged; differences from Deep Ensembles are paired by seed.
        protocol: what to test on.
        data: the data set, where the runs were trained on data of your own.
        engine: how to compute; only device, memory format and `run` matter here.
        progress, say: told what happens meanwhile.

    Predictions are kept beside each run, so that nothing is computed twice.
    """
    if not runs:
        raise ValueError("Give at least one run to evaluate.")
    trained = [read_run(folder) for folder in runs]
    rows = settings(trained)
    splits, name = _splits(trained, data)
    conditions = [
        test_sets.clean(splits, protocol),
        *test_sets.corrupted(splits, name, protocol, say),
        *test_sets.unfamiliar(splits, name, protocol),
    ]
    predictors = [Predictor(run, engine) for run in trained]
    _predict_all(predictors, conditions, progress)
    measured = {str(run): measure_run(run, conditions) for run in trained}
    results = {
        "data": name,
        "classes": splits.classes,
        "class_names": list(splits.names),
        "examples": len(conditions[0].positions),
        "conditions": [condition.name for condition in conditions],
        "runs": list(measured.values()),
        "settings": compare(rows, measured),
        "provenance": provenance(),
    }
    return Evaluation(results, rows, splits, conditions, protocol)


def _splits(runs: list[TrainedRun], data: DataSet | None) -> tuple[Splits, str]:
    """The data that all runs were trained on, and the name of their class."""
    if data is not None:
        return data.load(), type(data).__name__
    first, *others = ({key: run.recipe["data"].get(key) for key in run.recipe["data"]} for run in runs)
    splits = runs[0].data().load()
    for run, other in zip(runs[1:], others, strict=True):
        if other != first and run.data().load().test.digest() != splits.test.digest():
            raise ValueError(
                f"{runs[0]} was trained on {first['class']} and {run} on {other['class']}, which have other test sets; "
                "evaluate them apart."
            )
    return splits, str(first["class"])


def _predict_all(predictors: list[Predictor], conditions: list[Condition], progress: Progress) -> None:
    missing = [(p, c) for p in predictors for c in conditions if not is_kept(p.run, c)]
    total = sum(len(condition.positions) for _, condition in missing)
    done = 0
    try:
        for finished, (predictor, condition) in enumerate(missing):
            what = f"{predictor.run.folder.path.name}: {condition.name}"
            progress(done, total, what)
            start = done

            def tick(more: int, what: str = what) -> None:
                nonlocal done
                done += more
                progress(done, total, what)

            predict(predictor, condition, tick)
            done = start + len(condition.positions)  # those that cannot be read are done with, too
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            f"stopped; predictions on {finished} of {len(missing)} test sets that were missing are kept, and the same "
            "command goes on from there."
        ) from interrupt
