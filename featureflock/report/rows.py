"""The settings of an evaluation, each with its runs and all that was measured of them."""

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.evaluation.runs import TrainedRun
from featureflock.evaluation.statistics import SeedMean, mean


@dataclass(frozen=True, eq=False)
class ReportRow:
    """A setting: a row of a table, a line of a figure."""

    title: str
    style: int
    """Its place, which gives it a colour and a mark."""
    entry: dict[str, Any]
    """Of results["settings"]."""
    runs: list[TrainedRun]
    measured: list[dict[str, Any]]
    """Of results["runs"], in the order of `runs`."""

    @property
    def members(self) -> int:
        return int(self.entry["members"])

    def metric(self, key: str) -> SeedMean | None:
        """Over seeds."""
        found = self.entry["metrics"].get(key)
        return None if found is None else SeedMean(**found)

    def over_seeds(self, *path: str) -> SeedMean:
        """The mean of a number that each run has, at this path in what was measured."""
        found: list[Any] = [functools.reduce(operator.getitem, path, entry) for entry in self.measured]
        return mean(found)


def shown_settings(evaluation: Evaluation) -> list[ReportRow]:
    """In the order of the tables. A run's numbers are those that carry its recipe, which no two runs share."""
    entries = evaluation.results["runs"]
    found = []
    for k, (setting, entry) in enumerate(zip(evaluation.settings, evaluation.results["settings"], strict=True)):
        measured = [next(e for e in entries if _is_of(e, run)) for run in setting.runs]
        found.append(ReportRow(setting.title, k, entry, setting.runs, measured))
    return found


def baseline_of(settings: list[ReportRow]) -> ReportRow | None:
    """The setting that others are compared with: Deep Ensembles."""
    against = next((s.entry["against"] for s in settings if "against" in s.entry), None)
    return next((s for s in settings if s.title == against), None)


def corrupted_sets(settings: list[ReportRow]) -> Iterator[tuple[str, list[str]]]:
    """Each corruption with its severities that all runs were tested on."""
    all_runs = [entry.get("corrupted", {}) for s in settings for entry in s.measured]
    for corruption, severities in all_runs[0].items():
        yield corruption, [v for v in severities if all(v in sets.get(corruption, {}) for sets in all_runs)]


def _is_of(entry: dict[str, Any], run: TrainedRun) -> bool:
    return bool(entry["recipe"] == run.recipe)
