"""Rows of the report: each group of runs with its results."""

from collections.abc import Sequence
from dataclasses import dataclass

from featureflock.evaluation.results import EvaluationResults, GroupResult, RunResult


@dataclass(frozen=True, eq=False)
class ReportRow:
    """A group of runs that differ in their seed alone: a row of a table, a line of a figure."""

    title: str
    style: int
    """Index of its colour and marker."""
    group: GroupResult
    runs: list[RunResult]


def report_rows(results: EvaluationResults) -> list[ReportRow]:
    """Rows in the order of the tables."""
    runs = {run.name: run for run in results.runs}
    if empty := [group.title for group in results.groups if not group.runs]:
        raise ValueError(f"The group {empty[0]!r} of these results has no runs; evaluate the runs again.")
    missing = [name for group in results.groups for name in group.runs if name not in runs]
    if missing or not results.groups:
        what = f"no run {missing[0]!r}, which one of their groups lists" if missing else "no groups of runs"
        raise ValueError(f"These results have {what}; evaluate the runs again.")
    return [ReportRow(g.title, k, g, [runs[name] for name in g.runs]) for k, g in enumerate(results.groups)]


def corrupted_sets(rows: Sequence[ReportRow]) -> dict[str, list[str]]:
    """Each corruption with the severities that all runs were tested on."""
    runs = [run for row in rows for run in row.runs]
    common = {
        corruption: [s for s in severities if all(s in run.corrupted.get(corruption, {}) for run in runs)]
        for corruption, severities in runs[0].corrupted.items()
    }
    return {corruption: severities for corruption, severities in common.items() if severities}
