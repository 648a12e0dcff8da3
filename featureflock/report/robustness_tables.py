"""Accuracy by corruption, and out-of-distribution (OOD) detection."""

from collections.abc import Sequence
from statistics import fmean

from featureflock.evaluation.metrics.registry import METRICS, Better
from featureflock.report.rows import ReportRow, baseline_of, corrupted_sets
from featureflock.report.tables import METHOD, MISSING, ColumnHeader, Table, TableCell, mark_best, shorten

MEASURES = {"entropy": "entropy", "mutual_information": "mutual information", "top_probability": "top probability"}
_DETECTION: dict[str, tuple[str, Better, str]] = {
    "auroc": ("AUROC", "higher", "probability that an OOD input is more uncertain than a test input"),
    "aupr": ("AUPR", "higher", "area under the precision-recall curve; depends on the sizes of both sets"),
    "fpr95": ("FPR95", "lower", "fraction of test inputs flagged when 95 % of the OOD inputs are"),
}
_HEAT = (0.25, 1.0, 3.0)
"""Differences in percentage points from which a cell is coloured, more strongly each."""


def corruption_table(rows: Sequence[ReportRow]) -> Table | None:
    """Accuracy by corruption, mean over severities and seeds, with the difference vs Deep Ensembles."""
    sets = corrupted_sets(rows)
    if not sets:
        return None
    baseline = baseline_of(rows)
    lines = [_accuracies(name, severities, rows, baseline) for name, severities in {"clean": [], **sets}.items()]
    note = "Accuracy in %, mean over severities and seeds."
    if baseline is not None and len(rows) > 1:
        note += (
            f" Second number: difference vs {baseline.title} in percentage points, blue if positive and orange if "
            "negative, whether significant or not."
        )
    titles = (ColumnHeader(shorten(row.title, 36), "higher", row.title) for row in rows)
    headers = (ColumnHeader("Corruption", numeric=False), *titles)
    return Table("corruptions", "Accuracy by corruption", headers, tuple(map(tuple, lines)), note)


def ood_table(rows: Sequence[ReportRow]) -> Table | None:
    """How well each uncertainty measure detects OOD inputs."""
    names = list(rows[0].runs[0].ood)
    if not names:
        return None
    columns = [(key, measure) for key in _DETECTION for measure in MEASURES]
    headers = [ColumnHeader("OOD set", numeric=False), METHOD]
    for key, measure in columns:
        title, better, meaning = _DETECTION[key]
        headers.append(ColumnHeader(f"{title}, {MEASURES[measure]}", better, meaning))
    lines: list[tuple[TableCell, ...]] = []
    for name in names:
        cells = [[_detection(row, name, measure, key) for key, measure in columns] for row in rows]
        named = ([TableCell(name), TableCell(row.title, style=row.style)] for row in rows)
        lines += mark_best(headers, [[*first, *rest] for first, rest in zip(named, cells, strict=True)])
    explained = "; ".join(f"{title}: {meaning}" for title, _, meaning in _DETECTION.values())
    note = (
        f"In %, means over seeds, before calibration. {explained}. Uncertainty is the entropy of the mean prediction "
        "(total), the mutual information of prediction and member (epistemic), or one minus the top probability."
    )
    return Table("ood", "OOD detection by uncertainty measure", tuple(headers), tuple(lines), note)


def _detection(row: ReportRow, name: str, measure: str, key: str) -> TableCell:
    if measure == "mutual_information" and row.members == 1:
        return MISSING
    value = row.over_seeds(lambda run: run.ood[name][measure][key]).mean
    return TableCell(f"{100 * value:.1f}", value=value)


def _accuracies(
    name: str, severities: list[str], rows: Sequence[ReportRow], baseline: ReportRow | None
) -> list[TableCell]:
    """A line of the table; no severities for the clean test set."""
    cells, text = [TableCell(name.replace("_", " "))], METRICS["accuracy"].text
    reference = None if baseline is None else _accuracy(baseline, name, severities)
    for row in rows:
        value = _accuracy(row, name, severities)
        detail, heat = "", 0
        if reference is not None and row is not baseline:
            points = 100 * (value - reference)
            detail = text(value - reference, sign=True)
            heat = sum(abs(points) >= bound for bound in _HEAT) * (1 if points > 0 else -1)
        cells.append(TableCell(text(value), detail=detail, value=value, heat=heat))
    return cells


def _accuracy(row: ReportRow, name: str, severities: list[str]) -> float:
    if not severities:
        return row.over_seeds(lambda run: run.clean.calibrated["accuracy"]).mean
    return row.over_seeds(lambda run: fmean(run.corrupted[name][s].calibrated["accuracy"] for s in severities)).mean
