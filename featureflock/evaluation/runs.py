"""Trained runs, as the evaluation sees them: what was trained, and which of them differ by their seed alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from featureflock.data import DataSet
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods import METHODS
from featureflock.training.build import rebuild
from featureflock.training.recipe import UnregisteredComponentError, data_set_from_json
from featureflock.training.run_folder import RunFolder


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A finished run of `featureflock train`."""

    folder: RunFolder
    recipe: dict[str, Any]
    environment: list[dict[str, Any]]
    """Machine, versions, command and commit, for each time that it was started."""
    result: dict[str, Any]
    curves: list[dict[str, Any]]
    """A line an epoch."""
    weights: str
    """SHA-256 of the trained weights."""

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def method(self) -> str:
        """As it is called in tables."""
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
            raise ValueError(
                f"{self} was trained on custom data ({self.recipe['data']['class']}), which its folder does not "
                "contain; call featureflock.evaluation.evaluate from Python with data=… instead."
            ) from error


_OWN = ("method", "members")
"""What a method is compared by, and how large it is."""


class RunGroup(NamedTuple):
    """Runs that differ by their seed alone: one row of a table."""

    title: str
    runs: list[TrainedRun]


def read_run(folder: Path | str) -> TrainedRun:
    """A finished run; what is wrong with a folder that holds none is said in one sentence."""
    run = RunFolder(Path(folder))
    if not run.path.is_dir():
        what = "is a file" if run.path.exists() else "does not exist"
        raise ValueError(f"{run} {what}; give the folder of a run that `featureflock train` made.")
    if not (run.path / "recipe.json").is_file():
        raise ValueError(f"{run} holds no run: it has no recipe.json. Give the folder that `featureflock train` made.")
    if not (run.path / "result.json").is_file():
        raise ValueError(f"{run} is not finished; go on with it by the command that began it, with --resume.")
    index = run.ensemble / "ensemble.json"
    try:
        weights = json.loads(index.read_bytes())["weights"]["sha256"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{index} is missing or damaged; train the run again in another folder.") from error
    recipe, environment, result = (run.read(f"{name}.json") for name in ("recipe", "environment", "result"))
    sound = isinstance(recipe, dict) and {"data", "method", "seed", "precision"} <= recipe.keys()
    for name, right in (("recipe", sound), ("environment", isinstance(environment, list)), ("result", bool(result))):
        if not right:
            raise ValueError(f"{run.path / name}.json is not what `featureflock train` writes; was it altered?")
    return TrainedRun(run, recipe, environment, result, run.read_metrics(), weights)


def settings(runs: Sequence[TrainedRun]) -> list[RunGroup]:
    """The runs by what they have in common, in the order in which they were given.

    The title is the method's. Where several settings have the same method, what they differ in is added to it.
    """
    together: dict[str, list[TrainedRun]] = {}
    for run in runs:
        group = together.setdefault(json.dumps(_facts(run), sort_keys=True), [])
        twin = next((other for other in group if other.seed == run.seed), None)
        if twin is not None:
            raise ValueError(f"{twin} and {run} are of the same recipe and seed; give only one of them.")
        group.append(run)
    groups = list(together.values())
    return [RunGroup(_title(group[0], [other[0] for other in groups]), group) for group in groups]


def differing(run: TrainedRun, other: TrainedRun) -> list[str]:
    """What two recipes differ in beside the method, the number of members and the seed."""
    ours, theirs = ({k: v for k, v in _facts(r).items() if k.split(".")[0] not in _OWN} for r in (run, other))
    return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


def _title(run: TrainedRun, others: list[TrainedRun]) -> str:
    alike = [_facts(other) for other in others if other.method == run.method]
    own = _facts(run)
    differing = [key for key in own if any(facts.get(key) != own[key] for facts in alike)]
    if not differing:
        return run.method
    words = [f"{key.removeprefix('method.').replace('.', ' ').replace('_', ' ')} {own[key]}" for key in differing]
    return f"{run.method} ({', '.join(words)})"


def _facts(run: TrainedRun) -> dict[str, Any]:
    """The recipe without its seed, flat: {"method.prior.precision": 0.001, …}."""
    return {key: value for key, value in flat(run.recipe) if key not in ("seed", "data.folder", "data.workers")}


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """A recipe in lines: a part by its class, and its fields behind dots."""
    if not isinstance(value, dict):
        return [(name, value)]
    return [
        pair
        for key, part in value.items()
        for pair in flat(part, (name if key == "class" else f"{name}.{key}").removeprefix("."))
    ]
