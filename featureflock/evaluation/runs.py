"""Trained runs, read from their folders and grouped into those that differ in their seed alone.

The seed may come with another subset of the training data, or with other data: runs with `split_seed` or the seed of
the data set equal to `seed` are one group too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from featureflock.data import DataSet
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods import METHODS
from featureflock.training.build import rebuild
from featureflock.training.recipe import UnregisteredComponentError, data_set_from_json
from featureflock.training.run_folder import RunFolder
from featureflock.utils.files import read_regular
from featureflock.utils.registry import PLUGINS


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A finished run of `featureflock train`."""

    folder: RunFolder
    recipe: dict[str, Any]
    environment: list[dict[str, Any]]
    """Machine, versions, command and commit of each start of the training."""
    result: dict[str, Any]
    curves: list[dict[str, Any]]
    """One entry per epoch."""
    weights: str
    """SHA-256 of the trained weights."""
    first_members: int | None = None
    """Evaluate only the first members, a smaller ensemble; None for all."""
    seeded_fields: tuple[str, ...] = ()
    """Fields that equal `seed` in all runs of a group in which each seed has its own training data: `split_seed`, or
    the seed of the data set."""

    def __str__(self) -> str:
        return str(self.folder) if self.first_members is None else f"{self.folder}, first {self.first_members} members"

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def method(self) -> str:
        """Title of the method, as in tables."""
        name = self.recipe["method"]["class"]
        return next((method.title for method in METHODS.values() if method.__name__ == name), name)

    def load_ensemble(self) -> Ensemble:
        """The trained ensemble."""
        return rebuild(self.folder)

    def data(self) -> DataSet:
        """The data set of the recipe."""
        try:
            return data_set_from_json(self.recipe["data"])
        except UnregisteredComponentError as error:
            what = f"{self} was trained on custom data ({self.recipe['data']['class']}), which are not in its folder"
            advice = f"name the module that registers the data set in {PLUGINS}, or call featureflock.evaluation."
            raise ValueError(f"{what}; {advice}evaluate_runs with data=… instead.") from error


_FREE_FIELDS = ("seed", "data.folder", "data.workers")
"""Recipe fields in which runs of one group may differ."""


class RunGroup(NamedTuple):
    """Runs that differ in their seed alone: one row of a table."""

    title: str
    runs: list[TrainedRun]


def read_run(folder: Path | str, first_members: int | None = None) -> TrainedRun:
    """Read a finished run; anything else is refused with a clear message.

    With `first_members`, it is the smaller ensemble of these members, as if it had been trained with so many. That is
    what it is for methods without interaction of the members, such as Deep Ensembles.
    """
    run = RunFolder(Path(folder))
    if not run.path.is_dir():
        what = "is a file" if run.path.exists() else "does not exist"
        raise ValueError(f"{run} {what}; give the folder of a run that `featureflock train` made.")
    if not (run.path / "recipe.json").is_file():
        raise ValueError(f"{run} is not a run: it has no recipe.json. Give a folder that `featureflock train` made.")
    if not (run.path / "result.json").is_file():
        raise ValueError(f"{run} is not finished; resume it by the command that started it, with --resume.")
    index = run.ensemble / "ensemble.json"
    try:
        weights = json.loads(read_regular(index))["weights"]["sha256"]
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{index} is missing or damaged; train the run again in another folder.") from error
    recipe, environment, result = (run.read(f"{name}.json") for name in ("recipe", "environment", "result"))
    finished = isinstance(result, dict) and {"train", "test"} <= result.keys()
    complete = isinstance(recipe, dict) and {"data", "method", "seed", "precision"} <= recipe.keys()
    for name, valid in (("recipe", complete), ("environment", isinstance(environment, list)), ("result", finished)):
        if not valid:
            raise ValueError(f"{run.path / name}.json is not a file that `featureflock train` wrote; was it modified?")
    if first_members is not None:
        trained = result.get("members", first_members)
        if not 1 <= first_members <= trained:
            raise ValueError(f"{run} has {trained} members, so its first {first_members} cannot be evaluated.")
        first_members = None if first_members == trained else first_members
        recipe = recipe if first_members is None else {**recipe, "members": first_members}
    return TrainedRun(run, recipe, environment, result, run.read_metrics(), weights, first_members)


def group_runs(runs: Sequence[TrainedRun], titles: Mapping[str, str] | None = None) -> list[RunGroup]:
    """Group runs that differ in their seed alone, in the order in which they were given.

    Runs of several seeds whose `split_seed` equals their `seed` are one group as well: each seed has its own training
    subset.

    The title of a group is its method. Groups of the same method get the fields in which they differ as well. `titles`
    by run are used instead if they tell all groups apart.
    """
    by_recipe: dict[str, list[TrainedRun]] = {}
    for run in _mark_new_subsets(runs):
        group = by_recipe.setdefault(json.dumps(_fields(run), sort_keys=True), [])
        if (twin := next((other for other in group if other.seed == run.seed), None)) is not None:
            raise ValueError(f"{twin} and {run} have the same recipe and seed; give only one of them.")
        group.append(run)
    groups = list(by_recipe.values())
    given = [titles[str(group[0])] for group in groups] if titles else []
    if len(set(given)) == len(groups):
        return [RunGroup(title, group) for title, group in zip(given, groups, strict=True)]
    return [RunGroup(_title(group[0], [other[0] for other in groups]), group) for group in groups]


def differing_fields(run: TrainedRun, other: TrainedRun) -> list[str]:
    """Recipe fields in which two runs differ, besides the method, the number of members and the seed."""
    ours, theirs = _fields(run), _fields(other)
    keys = [key for key in {**ours, **theirs} if key.split(".")[0] not in ("method", "members")]
    return [key for key in keys if ours.get(key) != theirs.get(key)]


def flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """A recipe as pairs: [("method", "FeatureWGD"), ("method.prior.precision", 0.001), …]."""
    if not isinstance(value, dict):
        return [(name, value)]
    names = {key: (name if key == "class" else f"{name}.{key}").removeprefix(".") for key in value}
    return [pair for key, part in value.items() for pair in flatten(part, names[key])]


def _title(run: TrainedRun, others: list[TrainedRun]) -> str:
    ours, same_method = _fields(run), [_fields(other) for other in others if other.method == run.method]
    differing = [key for key in ours if any(fields.get(key) != ours[key] for fields in same_method)]
    words = [f"{key.removeprefix('method.').replace('.', ' ').replace('_', ' ')} {ours[key]}" for key in differing]
    return f"{run.method} ({', '.join(words)})" if words else run.method


def _mark_new_subsets(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    """The runs, with `seeded_fields` set where each seed of a recipe has its own training data.

    That is so for runs whose `split_seed`, or the seed of whose data set, equals `seed`, if no other seed was trained
    on the same data, and if at least two of them differ in nothing else: a single run may be either.
    """
    by_split: dict[str, list[TrainedRun]] = {}
    for run in runs:
        by_split.setdefault(json.dumps(_fields(run), sort_keys=True), []).append(run)
    alone = {
        str(run)
        for group in by_split.values()
        if len({run.seed for run in group}) == 1 and group[0].seed in _seeds_of_data(group[0])
        for run in group
    }
    recipes = {str(run): dict(flatten(run.recipe)) for run in runs}
    candidates = {key for name in alone for key in _data_seeds(recipes[name])}
    seeded = {key for key in candidates if all(recipes[name].get(key) == recipes[name]["seed"] for name in alone)}
    marked = [replace(run, seeded_fields=tuple(seeded)) if str(run) in alone else run for run in runs]
    recipes_of_marked = [json.dumps(_fields(run), sort_keys=True) for run in marked if run.seeded_fields]
    return marked if len(set(recipes_of_marked)) < len(recipes_of_marked) else list(runs)


def _seeds_of_data(run: TrainedRun) -> set[Any]:
    fields = dict(flatten(run.recipe))
    return {fields[key] for key in _data_seeds(fields)}


def without_seed(data: Any) -> Any:
    """The data set of a recipe in JSON, without its seed and those of the data sets that it wraps."""
    if not isinstance(data, dict):
        return data
    return {key: without_seed(part) for key, part in data.items() if key != "seed"}


def _fields(run: TrainedRun) -> dict[str, Any]:
    """The flat recipe, without the fields in which runs of one group may differ."""
    fields = {key: value for key, value in flatten(run.recipe) if key not in _FREE_FIELDS}
    return fields | dict.fromkeys(run.seeded_fields, "seed")


def _data_seeds(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a flat recipe that choose training data: split_seed, data.seed, data.data.seed."""
    return [key for key in fields if key == "split_seed" or (key.startswith("data.") and key.endswith(".seed"))]
