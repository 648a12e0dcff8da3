"""Tables as data: columns, printed numbers, best values and significance.

    table = comparison(results)      one row per group of runs, one column per metric
    markdown(table)                  see formats.py; page.html renders tables as HTML

Columns come from the metric registry: a new metric appears in the table of its group.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from featureflock.corruptions import CORRUPTIONS, SEVERITIES
from featureflock.evaluation.metrics.registry import Better, Group, Metric, find_metric
from featureflock.evaluation.results import EvaluationResults, GroupResult
from featureflock.evaluation.statistics import PairedDifference, SeedMean

Significance = Literal["better", "worse", ""]
SYMBOLS: dict[Significance, str] = {"better": "▲", "worse": "▼", "": ""}
MAIN: tuple[Group, ...] = ("clean", "human", "corrupted")
"""Metric groups of the main comparison."""
SIGNIFICANCE_NOTE = (
    "In brackets the 95 % confidence interval (Student’s t). ▲ better and ▼ worse: significant (95 % interval "
    "excludes 0), from 3 seeds on."
)


@dataclass(frozen=True)
class TableCell:
    text: str
    spread: str = ""
    """Standard deviation over seeds."""
    detail: str = ""
    """Text after the number, such as a confidence interval."""
    p_value: str = ""
    """Corrected p-value of a difference."""
    value: float | None = None
    """Sort key. Cells without one are sorted by their text, or last in a column of numbers."""
    best: bool = False
    significance: Significance = ""
    heat: int = 0
    """Background colour, from −3 (much worse) to 3 (much better)."""
    style: int | None = None
    """Index of the row's colour and marker, for the cell with its title."""

    @property
    def plain(self) -> str:
        """The whole cell on one line."""
        detail = ", ".join(filter(None, (self.detail, self.p_value)))
        parts = (self.text, f"± {self.spread}" if self.spread else "", detail, SYMBOLS[self.significance])
        return " ".join(filter(None, parts))


class ColumnHeader(NamedTuple):
    """Title of a column, and what the tooltip says."""

    title: str
    better: Better = ""
    meaning: str = ""
    numeric: bool = True

    @property
    def arrow(self) -> str:
        return {"higher": "↑", "lower": "↓", "": ""}[self.better]


@dataclass(frozen=True)
class Table:
    """A table in no particular format."""

    name: str
    """For links and LaTeX labels."""
    title: str
    headers: Sequence[ColumnHeader]
    rows: Sequence[Sequence[TableCell]]
    note: str = ""
    kind: str = "table"

    @property
    def header_texts(self) -> list[str]:
        return [f"{header.title} {header.arrow}".strip() for header in self.headers]


METHOD = ColumnHeader("Method", numeric=False)
MISSING = TableCell("–")


def comparison(results: EvaluationResults) -> Table:
    """Means over seeds on clean and corrupted test sets; the best values are bold."""
    groups, metrics = results.groups, metrics_in(results, *MAIN)
    headers = [METHOD, ColumnHeader("Members"), ColumnHeader("Seeds"), *map(metric_header, metrics)]
    rows = [
        [TableCell(g.title, style=k), _count(g.members), _count(len(g.seeds)), *mean_cells(g.metrics, metrics)]
        for k, g in enumerate(groups)
    ]
    corrupted = any(metric.group == "corrupted" for metric in metrics)
    title = "All methods" if len(groups) > 1 else "Clean and corrupted test sets" if corrupted else "Clean test set"
    note = _seeds_note(groups)
    if any(g.deep_ensemble_equivalent is not None for g in groups):
        meaning = "number of members with which Deep Ensembles reach the same calibrated NLL"
        headers.append(ColumnHeader("DEE", "higher", meaning))
        for row, g in zip(rows, groups, strict=True):
            row.append(_equivalent(g.deep_ensemble_equivalent))
        note += f" DEE: {meaning}."
    sets = {s.name for s in results.test_sets if s.kind == "corrupted"}
    every = {f"{corruption}-{severity}" for corruption in CORRUPTIONS for severity in SEVERITIES}
    if sets and sets != every:
        count = f"{len(sets)} of {len(every)}" if sets < every else f"{len(sets)}"
        note += f" Corrupted metrics (cA: accuracy, cNLL, …) are means over {count} corrupted test sets."
    return Table("comparison", title, headers, mark_best(headers, rows), note)


def metric_table(results: EvaluationResults, name: str, title: str, metrics: Sequence[Metric]) -> Table | None:
    """Means over seeds of these metrics; None if there are none."""
    if not metrics:
        return None
    headers = [METHOD, *map(metric_header, metrics)]
    rows = [[TableCell(g.title, style=k), *mean_cells(g.metrics, metrics)] for k, g in enumerate(results.groups)]
    return Table(name, title, headers, mark_best(headers, rows), _seeds_note(results.groups))


def differences(
    results: EvaluationResults, metrics: Sequence[Metric] | None = None, name: str = "differences"
) -> Table | None:
    """Differences vs Deep Ensembles, paired by seed; None if there are none."""
    compared = [(k, g) for k, g in enumerate(results.groups) if g.differences]
    if not compared:
        return None
    wanted = metrics_in(results, *MAIN) if metrics is None else metrics
    known = [m for m in wanted if any(m.key in g.differences for _, g in compared)]
    headers = [METHOD, *map(metric_header, known)]
    rows = []
    for k, g in compared:
        rows.append([TableCell(g.title, style=k), *(difference_cell(m, g.differences.get(m.key)) for m in known)])
    shared, paired = [shared_seeds(g) for _, g in compared], [g.differences for _, g in compared]
    if len(set(shared)) > 1:
        headers.insert(1, ColumnHeader("Shared seeds"))
        for row, count in zip(rows, shared, strict=True):
            row.insert(1, _count(count))
    note = "One shared seed: differences without a confidence interval."
    if max(shared) > 1:
        over = f", over {shared[0]} seeds" if len(set(shared)) == 1 else ""
        note = f"Mean difference on the same seed{over}. {SIGNIFICANCE_NOTE}{_endpoints_note(known, paired)}"
    if others := dict.fromkeys(field for _, g in compared for field in g.baseline_differs_in):
        note += f" The recipes differ in more than the method: {', '.join(others)}."
    title = f"Difference vs {in_words(dict.fromkeys(g.baseline or '' for _, g in compared))}"
    return Table(name, title, headers, rows, note)


def beside_paper(results: dict[str, Any]) -> Table:
    """The results of `reproduce` beside the paper's numbers, with differences vs Deep Ensembles."""
    rows = results["rows"]
    metrics = [find_column(key) for key in dict.fromkeys(key for row in rows for key in row["ours"])]
    headers = [ColumnHeader("", numeric=False), ColumnHeader("Members"), *map(metric_header, metrics)]
    ours = []
    for row in rows:
        means = {key: SeedMean(**value) for key, value in row["ours"].items()}
        ours.append([TableCell(row["title"]), TableCell(str(row["members"])), *mean_cells(means, metrics)])
    lines: list[list[TableCell]] = []
    for row, our_cells in zip(rows, mark_best(headers, ours), strict=True):
        lines.append(our_cells)
        if paired := _paired(row):
            cells = [difference_cell(m, paired.get(m.key)) for m in metrics]
            lines.append([TableCell(f"difference vs {row['against']}"), TableCell(""), *cells])
        if row["paper"]:
            cells = [TableCell(row["paper"].get(m.key, "")) for m in metrics]
            lines.append([TableCell("paper"), TableCell(""), *cells])
    seeds = max(value["seeds"] for row in rows for value in row["ours"].values())
    corrupted = results["corrupted_examples"] and any(metric.group in ("corrupted", "severity") for metric in metrics)
    fewer = f" and {results['corrupted_examples']:,} of each corrupted test set" if corrupted else ""
    scale = f"Ours at {results['scale']} scale, the paper's at full scale. " if any(r["paper"] for r in rows) else ""
    values = "Mean ± standard deviation over" if seeds > 1 else "Values of"
    note = f"{scale}{values} {plural(seeds, 'seed')}, on {results['test_examples']:,} test examples{fewer}."
    note += " Our best values in bold."
    if any(row.get("differences") for row in rows):
        paired_rows = [_paired(row) for row in rows]
        tested = f" Differences are paired by seed. {SIGNIFICANCE_NOTE}{_endpoints_note(metrics, paired_rows)}"
        note += tested if seeds > 1 else " Differences have no interval."
    if at_bound := [m for m in metrics if any(m.key in row.get("at_bound", ()) for row in rows)]:
        names = in_words(m.title for m in at_bound)
        note += (
            f" A fitted temperature is at its bound in some rows, where calibrated values ({names}) are not reliable."
        )
    return Table("beside-paper", results["what"], headers, lines, note)


def metrics_in(results: EvaluationResults, *groups: Group) -> list[Metric]:
    """Metrics of these table groups that at least one row has a value for."""
    keys = dict.fromkeys(key for group in results.groups for key in group.metrics)
    return sorted((m for m in map(find_column, keys) if m.group in groups), key=lambda m: groups.index(m.group))


def significance(metric: Metric, difference: PairedDifference) -> Significance:
    """Whether a paired difference is significant, and in whose favour."""
    if not difference.significant or not metric.better:
        return ""
    return "better" if (difference.mean > 0) == (metric.better == "higher") else "worse"


def shared_seeds(group: GroupResult) -> int:
    """Number of seeds that a group shares with its baseline."""
    return max((difference.seeds for difference in group.differences.values()), default=0)


def mark_best(headers: Sequence[ColumnHeader], rows: Sequence[Sequence[TableCell]]) -> list[list[TableCell]]:
    """The rows with the best value of each column marked; values that print alike are equally good."""
    marked = [list(row) for row in rows]
    for k, header in enumerate(headers):
        values = [(row[k].value or 0.0, row[k].text) for row in rows if row[k].value is not None]
        if header.better and len(values) > 1:
            best = (max if header.better == "higher" else min)(values, key=lambda pair: pair[0])[1]
            for row in marked:
                row[k] = replace(row[k], best=row[k].text == best)
    return marked


def shorten(text: str, length: int) -> str:
    """At most `length` characters, the last an ellipsis if the text was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def in_words(parts: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, one: str) -> str:
    """1 run, 2 runs; 1 class, 2 classes."""
    return f"{count:,} {one}{'' if count == 1 else 'es' if one.endswith('s') else 's'}"


def find_column(key: str) -> Metric:
    """The registered metric, or a plain column for a key that is not registered here."""
    try:
        return find_metric(key)
    except ValueError:
        return Metric(key, key.replace("_", " "), "", "fixed:4", lambda run: None)


def metric_header(metric: Metric) -> ColumnHeader:
    """The column of a metric."""
    return ColumnHeader(metric.title, metric.better, metric.meaning)


def mean_cells(means: dict[str, SeedMean], metrics: Sequence[Metric]) -> list[TableCell]:
    """Means over seeds with their standard deviation."""
    return [
        TableCell(m.text(seed_mean.mean), "" if seed_mean.sd is None else m.text(seed_mean.sd), value=seed_mean.mean)
        if (seed_mean := means.get(m.key))
        else MISSING
        for m in metrics
    ]


def difference_cell(metric: Metric, difference: PairedDifference | None) -> TableCell:
    """A difference with its confidence interval and significance."""
    if difference is None:
        return MISSING
    low, high, text = difference.low, difference.high, metric.text(difference.mean, sign=True)
    interval = "" if low is None or high is None else f"[{metric.text(low)}, {metric.text(high)}]"
    p_value = "" if difference.p_holm is None else f"p {_p_text(difference.p_holm)}"
    outcome = significance(metric, difference)
    return TableCell(text, detail=interval, p_value=p_value, value=difference.mean, significance=outcome)


def _p_text(p: float) -> str:
    """< 0.001, or = and two significant digits: = 0.023."""
    return "< 0.001" if p < 0.001 else f"= {p:.2g}" if p < 0.995 else "= 1"


def _paired(row: dict[str, Any]) -> dict[str, PairedDifference]:
    """The paired differences of a row of a study; empty if there are none."""
    return {key: PairedDifference(**value) for key, value in (row.get("differences") or {}).items()}


def _endpoints_note(metrics: Sequence[Metric], rows: Iterable[Mapping[str, PairedDifference]]) -> str:
    """Which columns are tested by corrected p-values; empty if none are."""
    corrected = {key for row in rows for key, difference in row.items() if difference.p_holm is not None}
    names = [metric.title.removesuffix(", %") for metric in metrics if metric.key in corrected]
    if not names:
        return ""
    return (
        f" The endpoints ({in_words(names)}) are marked by p < 0.05 after Holm’s correction for all endpoints of the "
        "row; their p is the corrected value. Intervals are not corrected."
    )


def _count(number: int) -> TableCell:
    return TableCell(str(number), value=number)


def _equivalent(size: float | str | None) -> TableCell:
    if isinstance(size, str):  # more than 5
        return TableCell(size.replace("more than", ">"), value=math.inf)
    return MISSING if size is None else TableCell(f"{size:.1f}", value=size)


def _seeds_note(groups: Sequence[GroupResult]) -> str:
    counts = sorted({len(group.seeds) for group in groups})
    if counts == [1]:
        return "One seed each."
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"Mean ± standard deviation over {seeds} seeds.{' Best values in bold.' if len(groups) > 1 else ''}"
