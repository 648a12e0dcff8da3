"""Plan of an evaluation: the runs, and the test sets that they are evaluated on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from featureflock.data import DataSet, Splits
from featureflock.evaluation import cam_cache, test_sets
from featureflock.evaluation.cam_cache import MapKind
from featureflock.evaluation.human_labels import read_human_labels
from featureflock.evaluation.images import are_images
from featureflock.evaluation.runs import TrainedRun, read_run, without_seed
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet, Log, all_test_sets, has_one_class
from featureflock.training.recipe import recipe_differences


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
        return test_sets.validation(self.splits if self.custom_data is not None else run.splits(), run.recipe)

    def data_notes(self) -> list[str]:
        """Notes on data that have changed since runs were trained."""
        if self.custom_data is not None:
            return []
        digest, notes = self.splits.test.digest(), list[str]()
        changed = [n for run, n in zip(self.runs, self.names, strict=True) if run.manifest.data.get("test") != digest]
        if changed:
            notes.append(f"The test data have changed since these runs were trained: {', '.join(changed)}.")
        by_recipe: dict[str, set[str]] = {}
        for run in self.runs:
            chosen = [run.recipe[key] for key in ("data", "subset", "validation", "split_seed")]
            by_recipe.setdefault(json.dumps(chosen), set()).add(run.manifest.data["train"])
        if any(len(digests) > 1 for digests in by_recipe.values()):
            notes.append("Some runs were trained on different training data, although their recipes are the same.")
        return notes


def plan_evaluation(
    folders: Sequence[Path | str],
    protocol: EvaluationProtocol,
    data: DataSet | None = None,
    log: Log = lambda _: None,
    sizes: Sequence[int] = (),
) -> EvaluationPlan:
    """Read the runs and prepare their test sets, which must be the same for all."""
    return _plan(read_runs(folders, sizes), protocol, data, log)


def read_runs(folders: Sequence[Path | str], sizes: Sequence[int] = ()) -> list[TrainedRun]:
    """Read finished runs; with `sizes`, their first members only."""
    if not folders:
        raise ValueError("Give at least one run to evaluate.")
    members: Sequence[int | None] = sizes or [None] * len(folders)
    return [read_run(folder, size) for folder, size in zip(folders, members, strict=True)]


def plan_by_data(
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
    for run in runs:
        run.check_inputs(splits)
    chosen = all_test_sets(splits, data_set, protocol, log)
    mapped = cam_cache.images_to_map(chosen, protocol) if has_one_class(splits) and are_images(splits.test) else {}
    return EvaluationPlan(runs, splits, data_set, chosen, mapped, _names(runs), data, human)


def _names(runs: Sequence[TrainedRun]) -> list[str]:
    """Short names of runs: the last part of their paths, or as many parts as are needed to tell them apart."""
    parts, depth = [run.folder.path.absolute().parts for run in runs], 1
    while len({part[-depth:] for part in parts}) < len(set(parts)) and depth < max(map(len, parts)):
        depth += 1
    ends = ["" if run.first_members is None else f", first {run.first_members} members" for run in runs]
    return ["/".join(part[-depth:]) + end for part, end in zip(parts, ends, strict=True)]
