"""Where the numbers come from: recipes, seeds, machines, versions and commits of all runs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from featureflock.evaluation.runs import flat
from featureflock.report.rows import ReportRow

Facts = list[tuple[str, str]]


class Choice(NamedTuple):
    """An entry of a recipe."""

    name: str
    value: str
    differs: bool
    """Whether other settings have another value."""


@dataclass(frozen=True)
class RowProvenance:
    """A setting: what was trained, and each of its runs."""

    title: str
    style: int
    recipe: list[Choice]
    runs: list[tuple[str, list[Facts]]]
    """What each run is called, and the facts of each time that it was started."""


def sources(settings: list[ReportRow]) -> list[RowProvenance]:
    recipes = [_in_lines(s.runs[0].recipe) for s in settings]
    found = []
    for s, own in zip(settings, recipes, strict=True):
        recipe = [
            Choice(name, value, any(other.get(name) != value for other in recipes))
            for name, value in own.items()
            if name != "seed"
        ]
        runs = [(f"{e['folder']}, seed {e['seed']}", _run(e)) for e in s.measured]
        found.append(RowProvenance(s.title, s.style, recipe, runs))
    return found


def facts(provenance: dict[str, Any]) -> Facts:
    """Date, command, commit, machine and versions, in words."""
    machine, versions = provenance.get("machine") or {}, provenance.get("versions") or {}
    parts = [machine.get("processor"), f"{machine['cores']} cores" if machine.get("cores") else None]
    parts += [machine.get("gpu"), machine.get("system")]
    commit = str(provenance.get("commit") or "none: an installed package")
    found = [
        ("date", str(provenance.get("date", ""))),
        ("command", str(provenance.get("command", ""))),
        ("commit", commit.replace("+", ", with changes since")),
        ("machine", ", ".join(str(part) for part in parts if part)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    if "compute" in provenance:
        found.append(("computed", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in provenance["compute"].items())))
    return [(name, text) for name, text in found if text]


def _in_lines(recipe: dict[str, Any]) -> dict[str, str]:
    """Method, method rank, … and their values in words."""
    return {
        key.replace(".", " ").replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in flat(recipe)
        if key
    }


def _run(entry: dict[str, Any]) -> list[Facts]:
    starts = entry["environment"]
    starts = starts if isinstance(starts, list) else [starts]
    found = []
    for k, start in enumerate(starts):
        own = facts(start)
        if len(starts) > 1:
            own.insert(0, ("start", f"{k + 1} of {len(starts)}, from step {start.get('from_step', 0)}"))
        found.append(own)
    training = entry.get("training") or {}
    result: Facts = []
    if "parameters" in training:
        result.append(("parameters", f"{training['parameters']:,}"))
    if "seconds" in training:
        result.append(("training took", _duration(training["seconds"])))
    if "steps" in training:
        result.append(("steps", f"{training['steps']:,}"))
    return [*found, result] if result else found


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
