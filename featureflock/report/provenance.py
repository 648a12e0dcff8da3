"""Recipes, seeds, machines, versions and commits of all runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from featureflock.evaluation.results import RunResult
from featureflock.evaluation.runs import flatten
from featureflock.report.rows import ReportRow

Facts = list[tuple[str, str]]


class RecipeField(NamedTuple):
    """A field of a recipe."""

    name: str
    value: str
    differs: bool
    """Whether another row has another value."""


class RowProvenance(NamedTuple):
    """What a row was trained with, and its runs."""

    row: ReportRow
    recipe: list[RecipeField]
    runs: list[tuple[str, list[Facts]]]
    """Name of each run, and the facts of each of its starts."""


def row_provenance(rows: Sequence[ReportRow]) -> list[RowProvenance]:
    """Recipe and runs of each row."""
    recipes = [_fields(row.runs[0].recipe) for row in rows]
    found = []
    for row, fields in zip(rows, recipes, strict=True):
        recipe = [
            RecipeField(name, value, any(other.get(name) != value for other in recipes))
            for name, value in fields.items()
            if name != "seed"
        ]
        found.append(RowProvenance(row, recipe, [(f"{run.name}, seed {run.seed}", _run(run)) for run in row.runs]))
    return found


def facts(provenance: dict[str, Any]) -> Facts:
    """Date, command, commit, machine and versions."""
    machine, versions = provenance.get("machine") or {}, provenance.get("versions") or {}
    parts = [machine.get("processor"), f"{machine['cores']} cores" if machine.get("cores") else None]
    parts += [machine.get("gpu"), machine.get("system")]
    commit = str(provenance.get("commit") or "none (installed package)")
    compute = provenance.get("compute") or provenance.get("setup") or {}
    found = [
        ("date", str(provenance.get("date", ""))),
        ("command", str(provenance.get("command", ""))),
        ("commit", commit.replace("+", ", with uncommitted changes")),
        ("machine", ", ".join(str(part) for part in parts if part)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("compute", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in compute.items())),
    ]
    return [(name, text) for name, text in found if text]


def _fields(recipe: dict[str, Any]) -> dict[str, str]:
    """Fields of a recipe by readable names: method, method rank, …."""
    return {
        key.replace(".", " ").replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in flatten(recipe)
        if key
    }


def _run(run: RunResult) -> list[Facts]:
    starts, found = run.environment, []
    for k, start in enumerate(starts):
        resumed = [("start", f"{k + 1} of {len(starts)}, from step {start.get('from_step', 0)}")]
        found.append([*(resumed if len(starts) > 1 else []), *facts(start)])
    training = run.training
    result: Facts = [(name, f"{training[name]:,}") for name in ("parameters", "steps") if name in training]
    if "seconds" in training:
        result.append(("training time", _duration(training["seconds"])))
    return [*found, result] if result else found


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
