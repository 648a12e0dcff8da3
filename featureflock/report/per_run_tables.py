"""Tables of what is measured of single runs, as means over the runs of a setting."""

from featureflock.report.rows import ReportRow, baseline_of, corrupted_sets
from featureflock.report.tables import Column, ColumnHeader, Table, TableCell, cut, fixed, with_best

MEASURES = {"entropy": "entropy", "mutual_information": "mutual information", "top_probability": "top probability"}
_DETECTION = (
    Column("auroc", "AUROC", 1, "high", "chance that an unfamiliar input is less certain than a familiar one", True),
    Column("aupr", "AUPR", 1, "high", "area under precision and recall; depends on how many of each there are", True),
    Column("fpr95", "FPR95", 1, "low", "familiar inputs flagged when 95 % of the unfamiliar are", True),
)
_HEAT = (0.25, 1.0, 3.0)
"""Percentage points of accuracy from which a difference is coloured more strongly."""


def corruption_table(settings: list[ReportRow]) -> Table | None:
    """Accuracy for each corruption, mean over severities and seeds, with the difference from Deep Ensembles."""
    sets = {name: held for name, held in corrupted_sets(settings) if held}
    if not sets:
        return None
    baseline = baseline_of(settings)
    rows = [tuple(_accuracies("clean", None, settings, baseline))]
    for name, severities in sets.items():
        rows.append(tuple(_accuracies(name, severities, settings, baseline)))
    note = "Accuracy in %, mean over severities and seeds."
    if baseline is not None and len(settings) > 1:
        note += (
            f" Beside it the difference from {baseline.title} in percentage points: blue for more, orange for less, "
            "whether beyond noise or not."
        )
    heads = (
        ColumnHeader("Corruption", numeric=False),
        *(ColumnHeader(cut(s.title, 36), "high", s.title) for s in settings),
    )
    return Table("corruptions-table", "Accuracy by corruption", heads, tuple(rows), note)


def detection_table(settings: list[ReportRow]) -> Table | None:
    """How well unfamiliar inputs are told from familiar ones."""
    names = list(settings[0].measured[0].get("unfamiliar", {}))
    if not names:
        return None
    kinds = [(detection, measure) for detection in _DETECTION for measure in MEASURES]
    heads = [ColumnHeader("Inputs", numeric=False), ColumnHeader("Method", numeric=False)]
    heads += [ColumnHeader(f"{d.title}, {MEASURES[measure]}", d.better, d.meaning) for d, measure in kinds]
    rows: list[tuple[TableCell, ...]] = []
    for name in names:
        group = []
        for s in settings:
            cells = [_detected(s, name, measure, d.key) for d, measure in kinds]
            group.append([TableCell(name), TableCell(s.title, style=s.style), *cells])
        rows += with_best(heads, group)
    note = (
        "In %, means over seeds, before calibration. AUROC: the chance that an unfamiliar input seems less certain "
        "than a familiar one. AUPR: area under precision and recall. FPR95: familiar inputs flagged when 95 % of the "
        "unfamiliar are. Uncertainty by the entropy of the mean prediction, by mutual information, or by the top "
        "probability."
    )
    return Table("detection", "Telling unfamiliar inputs from familiar ones", tuple(heads), tuple(rows), note)


def _detected(s: ReportRow, name: str, measure: str, key: str) -> TableCell:
    if measure == "mutual_information" and s.members == 1:
        return TableCell("–")
    value = s.over_seeds("unfamiliar", name, measure, key).mean
    return TableCell(fixed(100 * value, 1), value=value)


def _accuracies(
    name: str, severities: list[str] | None, settings: list[ReportRow], baseline: ReportRow | None
) -> list[TableCell]:
    cells = [TableCell(name.replace("_", " "))]
    reference = None if baseline is None else _accuracy(baseline, name, severities)
    for s in settings:
        value = _accuracy(s, name, severities)
        aside, heat = "", 0
        if reference is not None and s is not baseline:
            points = 100 * (value - reference)
            aside = fixed(points, 2, sign=True)
            heat = sum(abs(points) >= bound for bound in _HEAT) * (1 if points > 0 else -1)
        cells.append(TableCell(fixed(100 * value, 2), aside=aside, value=value, heat=heat))
    return cells


def _accuracy(s: ReportRow, name: str, severities: list[str] | None) -> float:
    if severities is None:
        return s.over_seeds("clean", "calibrated", "accuracy").mean
    each = [s.over_seeds("corrupted", name, v, "calibrated", "accuracy").mean for v in severities]
    return sum(each) / len(each)
