"""Accuracy by corruption, and out-of-distribution (OOD) detection."""

from collections.abc import Sequence
from statistics import fmean

from featureflock.evaluation.metrics.registry import METRICS, Better
from featureflock.evaluation.statistics import mean
from featureflock.reports.rows import ReportRow, corrupted_sets
from featureflock.reports.tables import METHOD, MISSING, ColumnHeader, Table, TableCell, mark_best, shorten

_MEASURES = {"entropy": "entropy", "mutual_information": "MI", "top_probability": "top"}
"""Uncertainty measures and their names in column headers."""
_DETECTION: dict[str, tuple[str, Better, str]] = {
    "auroc": ("AUROC", "higher", "probability that an OOD input is more uncertain than a test input"),
    "aupr": ("AUPR", "higher", "area under the precision-recall curve; depends on the sizes of both sets"),
    "fpr95": ("FPR95", "lower", "fraction of test inputs flagged when 95 % of the OOD inputs are"),
}
_HEAT = (0.25, 1.0, 3.0)
"""Thresholds in percentage points: a difference above each one gives a cell a stronger colour."""


def corruption_table(rows: Sequence[ReportRow]) -> Table | None:
    """Accuracy by corruption, mean over severities and seeds, with the difference vs Deep Ensembles."""
    sets = corrupted_sets(rows)
    if not sets:
        return None
    title = next((row.group.baseline for row in rows if row.group.baseline is not None), None)
    baseline = next((row for row in rows if row.title == title), None)
    lines, text = [], METRICS["accuracy"].text
    for name, severities in {"clean": [], **sets}.items():
        line = [TableCell(name.replace("_", " "))]
        for row in rows:
            value, detail, heat = _accuracy(row, name, severities), "", 0
            if baseline is not None and row is not baseline:
                difference = value - _accuracy(baseline, name, severities)
                detail, sign = text(difference, sign=True), 1 if difference > 0 else -1
                heat = sign * sum(abs(100 * difference) >= bound for bound in _HEAT)
            line.append(TableCell(text(value), detail=detail, value=value, heat=heat))
        lines.append(line)
    note = "Accuracy in %, mean over severities and seeds."
    if baseline is not None and len(rows) > 1:
        note += (
            f" Second number: difference vs {baseline.title} in percentage points, blue if positive and orange if "
            "negative, whether significant or not."
        )
    titles = [ColumnHeader(shorten(row.title, 36), "higher", row.title) for row in rows]
    headers = [ColumnHeader("Corruption", numeric=False), *titles]
    return Table("corruptions", "Accuracy by corruption", headers, lines, note)


def ood_table(rows: Sequence[ReportRow]) -> Table | None:
    """How well each uncertainty measure detects OOD inputs."""
    names = list(rows[0].runs[0].ood)
    if not names:
        return None
    headers = [ColumnHeader("OOD set", numeric=False), METHOD]
    for title, better, meaning in _DETECTION.values():
        headers += [ColumnHeader(f"{title}, {name}", better, meaning) for name in _MEASURES.values()]
    lines: list[list[TableCell]] = []
    for name in names:
        cells = [[_detection(row, name, measure, key) for key in _DETECTION for measure in _MEASURES] for row in rows]
        named = ([TableCell(name), TableCell(row.title, style=row.style)] for row in rows)
        lines += mark_best(headers, [[*first, *rest] for first, rest in zip(named, cells, strict=True)])
    explained = "; ".join(f"{title}: {meaning}" for title, _, meaning in _DETECTION.values())
    note = (
        f"In %, means over seeds, before calibration. {explained}. Uncertainty is the entropy of the mean prediction "
        "(total), the mutual information (MI) of prediction and member (epistemic), or one minus the top probability."
    )
    return Table("ood", "OOD detection by uncertainty measure", headers, lines, note)


def _detection(row: ReportRow, name: str, measure: str, key: str) -> TableCell:
    if measure == "mutual_information" and row.group.members == 1:
        return MISSING
    value = mean([run.ood[name][measure][key] for run in row.runs]).mean
    return TableCell(f"{100 * value:.1f}", value=value)


def _accuracy(row: ReportRow, name: str, severities: list[str]) -> float:
    """Mean over severities and seeds; no severities for the clean test set."""
    sets = [[run.corrupted[name][s] for s in severities] or [run.clean] for run in row.runs]
    return mean([fmean(scores.calibrated["accuracy"] for scores in run) for run in sets]).mean
