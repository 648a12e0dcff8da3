"""Evaluate the predictions of any ensemble, of this library or not: tensors or arrays.

    ff.evaluate(probs, labels)                                                 # (n, B, C) and (B,) -> scores
    ff.evaluate((means, variances), targets, task=ff.tasks.Regression())       # (n, B) each, and (B,)
    ff.evaluate({"mine": {0: probs_0, 1: probs_1}, "Deep Ensembles": {…}}, labels)   # methods x seeds -> results

Several methods and seeds are compared as run folders are: means over seeds, and differences paired by seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor

from featureflock.evaluation.array_runs import ArrayRun, is_test_set
from featureflock.evaluation.arrays import LOG_ZERO
from featureflock.evaluation.calibration import BOUNDS
from featureflock.evaluation.choose_calibration import at_lower_bound, held_out_calibration, held_out_note
from featureflock.evaluation.comparison import ComparedGroup, compare, notes
from featureflock.evaluation.endpoints import default_endpoints
from featureflock.evaluation.gallery import MemberVotes, VotedSet, disputed_examples
from featureflock.evaluation.measure import measure
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.predictions import Predictions
from featureflock.evaluation.results import EvaluationResults, RunResult, TestSetInfo
from featureflock.evaluation.run_predictions import Calibration, RunPredictions, SetPredictions, cross_validation
from featureflock.evaluation.test_sets import CalibrationChoice, Kind
from featureflock.methods import METHODS, DeepEnsembles
from featureflock.tasks import Classification, Task
from featureflock.utils.provenance import provenance
from featureflock.utils.registry import unknown_name

Seeds = Mapping[int, Any]
Methods = Mapping[str, Seeds]
"""Predictions by method, then by seed: an array, or a dictionary of arrays (array_runs.py)."""


@overload
def evaluate(
    predictions: Methods, labels: Any, task: Task = ..., *, logits: bool = ..., baseline: str | None = ...
) -> EvaluationResults: ...


@overload
def evaluate(predictions: Any, labels: Any, task: Task = ..., *, logits: bool = ...) -> dict[str, float]: ...


def evaluate(
    predictions: Any,
    labels: Any,
    task: Task = Classification(),
    *,
    logits: bool = False,
    baseline: str | None = None,
) -> dict[str, float] | EvaluationResults:
    """Return every metric of the registry that applies, from the members' predictions.

        ff.evaluate(probs, labels)["nll"]
        ff.evaluate({"probs": probs, "corrupted/fog/3": probs_fog, "ood/svhn": probs_svhn}, labels)

    Metrics are after calibration by test-time cross-validation; keys that begin with `raw_` are before it.

    Args:
        predictions: of one ensemble, or of several by method and seed, `{"mine": {0: …, 1: …}, "Deep Ensembles": …}`.
            For each, an array (n, B, …), or a dictionary of arrays for several test sets. Classification:
            probabilities (n, B, C), or (n, B, C, H, W) for segmentation. Multi-label: the probability of each label,
            (n, B, L). Regression: a pair (means, variances), (n, B, …) each.
        labels: class indices (B,) or (B, H, W); labels of 0 and 1, (B, L); numbers (B, …).
        task: the task that predictions and labels belong to.
        logits: whether arrays are logits or log-probabilities. In a dictionary, name them `logits` instead of `probs`.
        baseline: of several methods, the one that differences are from; by default Deep Ensembles.

    Returns:
        The metrics of one ensemble by key. For several methods, the results that a report is written from: means over
        seeds in `groups`, and differences vs the baseline, paired by seed, with confidence intervals.
    """
    if _is_one_ensemble(predictions):
        if baseline is not None:
            raise ValueError("baseline is for several methods; there is one ensemble.")
        run = ArrayRun.given(predictions, labels, task, logits)
        run.check()
        calibrations, _ = _calibrations({"": {0: run}}, "auto")
        return summarise(run.predictions(calibrations[""]))
    return evaluate_predictions(predictions, labels, task, logits=logits, baseline=baseline)


def evaluate_predictions(
    methods: Any,
    labels: Any,
    task: Task = Classification(),
    *,
    logits: bool = False,
    baseline: str | None = None,
    calibration: CalibrationChoice = "auto",
    data: str = "custom data",
    class_names: Sequence[str] = (),
    endpoints: Sequence[str] | None = None,
) -> EvaluationResults:
    """Measure and compare the predictions of methods × seeds. `ff.report` writes the results to a page.

    Args:
        methods: predictions by method and seed, or of one ensemble; labels, task, logits: see `evaluate`.
        baseline: the method that differences are from; by default Deep Ensembles, if there are any.
        calibration: as in `EvaluationProtocol`; held-out examples are the arrays `validation`, `validation_labels`.
        data: name of the data, for titles.
        class_names: names of the classes, for the page.
        endpoints: keys of metrics whose p-values are corrected for one another by Holm's method; by default those of
            the task.
    """
    if _is_one_ensemble(methods):
        methods = {"Ensemble": {0: methods}}
    groups: dict[str, dict[int, ArrayRun]] = {}
    for title, seeds in methods.items():
        if not isinstance(title, str) or not title.strip():
            raise ValueError(f"Methods must have names, such as 'Deep Ensembles'; got {title!r}.")
        title, runs = method_title(title), dict[int, ArrayRun]()
        if title in groups:
            raise ValueError(f"Two methods are called {title}; rename one of them.")
        for seed, given in _by_seed(title, seeds).items():
            runs[seed] = ArrayRun.given(given, labels, task, logits, f"{title}, seed {seed}")
        groups[title] = runs
    return compare_runs(groups, baseline, calibration, data, class_names, endpoints)


def compare_runs(
    groups: Mapping[str, Mapping[int, ArrayRun]],
    baseline: str | None,
    calibration: CalibrationChoice,
    data: str,
    class_names: Sequence[str],
    endpoints: Sequence[str] | None = None,
) -> EvaluationResults:
    """Measure and compare runs, which are by title and seed, and share their task and labels."""
    runs = {(title, seed): run for title, seeds in groups.items() for seed, run in seeds.items()}
    if not runs:
        raise ValueError("There are no predictions to evaluate; give at least one method with one seed.")
    baseline = DeepEnsembles.title if baseline is None else method_title(baseline)
    if baseline not in groups and baseline != DeepEnsembles.title:
        raise unknown_name("method", baseline, groups)
    for run in runs.values():
        run.check()
    first = next(iter(runs.values()))
    y = first.clean()[1]
    classes = _check_alike(runs, class_names)
    calibrations, note = _calibrations(groups, calibration)
    results = dict[tuple[str, int], RunResult]()
    for (title, seed), run in runs.items():
        predictions = run.predictions(calibrations[title])
        results[title, seed] = measure(predictions, f"{title}-seed{seed}", title, seed)
    rows = [ComparedGroup(title, [results[title, seed] for seed in seeds], {}) for title, seeds in groups.items()]
    if endpoints is None:
        endpoints = default_endpoints(first.task.kind, results.values())
    compared = [compare(row, rows, endpoints, baseline) for row in rows]
    remarks = [note] * bool(note) + notes([*results.values()], compared, len(y), baseline) + _zeros(runs, y)
    if len(groups) > 1 and baseline not in groups:
        remarks.append("To see differences, choose one of the methods as the baseline.")
    corrupted = [(c, s) for c, by in next(iter(results.values())).corrupted.items() for s in by]
    sets = [("clean", "clean", len(y)), *((f"{c}-{s}", "corrupted", len(y)) for c, s in corrupted)]
    sets += [(name, "ood", part.log_probs.shape[1]) for name, part in first.predictions().ood.items()]
    return EvaluationResults(
        data=data,
        classes=classes,
        class_names=list(class_names),
        examples=len(y),
        test_examples=len(y),
        test_sets=[TestSetInfo(*each) for each in sets],
        notes=remarks,
        runs=list(results.values()),
        groups=compared,
        endpoints=list(endpoints),
        provenance=provenance(),
        disputed=disputed_examples(_voted_sets(groups))[0],
        task=first.task.kind,
        dense=isinstance(first.task, Classification) and y.ndim > 1,
    )


def _voted_sets(groups: Mapping[str, Mapping[int, ArrayRun]]) -> Iterator[VotedSet]:
    """Each test set with the predictions of the first run of each method."""
    first_runs = {title: next(iter(seeds.values())) for title, seeds in groups.items()}
    runs = {title: run.predictions() for title, run in first_runs.items() if len(run.clean()[0]) > 1}
    first = next(iter(runs.values()), None)
    if first is None or not isinstance(first.task, Classification) or first.clean.read()[1].ndim > 1:
        return

    def voted(kind: Kind, name: str, of: Callable[[RunPredictions], SetPredictions]) -> VotedSet:
        return VotedSet(kind, name, lambda: {title: _votes(kind, of(run)) for title, run in runs.items()})

    yield voted("clean", "clean", lambda run: run.clean)
    for corruption, by_severity in first.corrupted.items():
        for severity in by_severity:
            of = partial(lambda c, s, run: run.corrupted[c][s], corruption, severity)
            yield voted("corrupted", f"{corruption}-{severity}", of)
    for name in first.ood:
        yield voted("ood", name, partial(lambda each, run: run.ood[each], name))


def _votes(kind: Kind, test_set: SetPredictions) -> MemberVotes:
    log_probs, y = test_set.read()
    positions = torch.arange(log_probs.shape[1])
    return MemberVotes.of(Predictions(log_probs, torch.zeros_like(positions) if kind == "ood" else y, positions))


def method_title(name: str) -> str:
    """Title of a registered method, such as Deep Ensembles for deep-ensembles; any other name as it is."""
    method = METHODS.get(name)
    return name.strip() if method is None else method.title


def _is_one_ensemble(predictions: Any) -> bool:
    """Whether these are an array or the test sets of one ensemble, not several methods."""
    return not isinstance(predictions, Mapping) or any(is_test_set(key) for key in predictions)


def _by_seed(title: str, seeds: Any) -> dict[int, Any]:
    """Predictions by seed; those without seeds get seed 0."""
    if isinstance(seeds, list):
        raise ValueError(
            f"{title}: give seeds as a dictionary, {{0: …, 1: …}}, and stack members with np.stack; got a list."
        )
    if not isinstance(seeds, Mapping) or any(is_test_set(key) for key in seeds):
        return {0: seeds}
    if not seeds or any(not isinstance(seed, Integral) or isinstance(seed, bool) for seed in seeds):
        got = ", ".join(map(repr, seeds)) or "none"
        raise ValueError(f"{title}: give its predictions by seed, {{0: …, 1: …}} with integers; got {got}.")
    return {int(seed): given for seed, given in seeds.items()}


def _check_alike(runs: Mapping[tuple[str, int], ArrayRun], class_names: Sequence[str]) -> int:
    """Check that runs have the same test sets and classes, and seeds the same members; return the number of classes."""
    first, members, classes = next(iter(runs.values())), dict[str, tuple[int, str]](), 0
    for (title, _), run in runs.items():
        if missing := {*first.test_sets} ^ {*run.test_sets}:
            lacking, other = (first, run) if min(missing) in run.test_sets else (run, first)
            what = f"{lacking.name} has no {min(missing)}, which {other.name} has"
            raise ValueError(f"{what}; all runs need the same test sets.")
        predictions, _ = run.clean()
        size, name = members.setdefault(title, (len(predictions), run.name))
        if size != len(predictions):
            what = f"{run.name} has {len(predictions)} members and {name} has {size}"
            raise ValueError(f"{what}; the seeds of one method need the same number of members.")
        found = _classes(run.task, predictions)
        classes = classes or found
        if found != classes:
            raise ValueError(f"{first.name} has {classes} classes and {run.name} has {found}; they must be the same.")
    if class_names and (len(class_names) != classes or not all(isinstance(name, str) for name in class_names)):
        raise ValueError(f"class_names must be {classes} strings, one for each class; got {list(class_names)}.")
    return classes


def _classes(task: Task, members: Tensor) -> int:
    """Number of classes or labels; 0 for regression."""
    if task.kind == "regression":
        return 0
    return members[0].shape[task.dim if isinstance(task, Classification) else 1]


def _calibrations(
    groups: Mapping[str, Mapping[int, ArrayRun]], choice: CalibrationChoice
) -> tuple[Mapping[str, Calibration], str]:
    """How each method is calibrated, and a note if it is not by cross-validation."""
    crossed: tuple[dict[str, Calibration], str] = dict.fromkeys(groups, cross_validation), ""
    runs = [run for seeds in groups.values() for run in seeds.values()]
    without = next((run for run in runs if "validation" not in run.arrays), None)
    if choice == "held-out" and without is not None:
        raise ValueError(f"{without.name} has no arrays validation and validation_labels to fit a temperature on.")
    if choice == "cross-validation" or without is not None:
        return crossed
    at_bound = sum(at_lower_bound(*run.clean()) for run in runs) if choice == "auto" else 0
    if choice == "auto" and not at_bound:
        return crossed
    parts = {title: [run.validation() for run in seeds.values()] for title, seeds in groups.items()}
    held_out = {title: held_out_calibration(each) for title, each in parts.items()}
    if choice == "auto" and any(calibration.temperature() in BOUNDS for calibration in held_out.values()):
        return crossed
    return held_out, held_out_note(len(runs[0].validation()[1]), at_bound, len(runs))


def _zeros(runs: Mapping[tuple[str, int], ArrayRun], y: Tensor) -> list[str]:
    """A note if labels have probability 0, so that their NLL is arbitrary."""
    count, total = 0, 0
    for run in runs.values():
        if isinstance(run.task, Classification) and y.ndim == 1:
            best = run.clean()[0].amax(0).gather(1, y[:, None])
            count, total = count + int((best <= LOG_ZERO).sum()), total + len(y)
    if not count:
        return []
    what = f"{count} of {total} labels have the probability 0, which counts as exp({LOG_ZERO:g}) in the NLL"
    return [f"{what}. Give logits instead, which do not underflow."]
