"""The tables, once, as data: which columns there are, how their numbers are printed, and which are best.

What they look like in Markdown, LaTeX, a terminal or HTML is for formats.py and page.html.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from featureflock.corruptions import CORRUPTIONS, SEVERITIES

Better = Literal["high", "low", ""]
Significance = Literal["better", "worse", "unclear", ""]
MINUS = "−"


class Column(NamedTuple):
    """A number of a setting, and how it is shown."""

    key: str
    """In the summary of a run."""
    title: str
    digits: int
    better: Better
    meaning: str
    percent: bool = False

    def text(self, value: float, sign: bool = False) -> str:
        return fixed(100 * value if self.percent else value, self.digits, sign)


@dataclass(frozen=True)
class TableCell:
    text: str
    spread: str = ""
    """The standard deviation over seeds."""
    aside: str = ""
    """What belongs to the number, such as an interval."""
    value: float | None = None
    """To sort by; None: by the text, or last in a column of numbers."""
    best: bool = False
    verdict: Significance = ""
    heat: int = 0
    """How strongly to colour it: −3, much worse, to 3, much better."""
    style: int | None = None
    """Which setting it names."""

    @property
    def for_script(self) -> str:
        """The value as JavaScript reads it."""
        return str(self.value).replace("inf", "Infinity")

    @property
    def plain(self) -> str:
        """All of it in one line."""
        spread = f" ± {self.spread}" if self.spread else ""
        aside = f" {self.aside}" if self.aside else ""
        return f"{self.text}{spread}{aside}{SYMBOLS[self.verdict]}"


class ColumnHeader(NamedTuple):
    title: str
    better: Better = ""
    meaning: str = ""
    numeric: bool = True

    @property
    def arrow(self) -> str:
        return {"high": "↑", "low": "↓", "": ""}[self.better]


@dataclass(frozen=True)
class Table:
    name: str
    """For links to it."""
    title: str
    heads: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""
    kind: str = "table"


SYMBOLS: dict[Significance, str] = {"better": " ▲", "worse": " ▼", "unclear": "", "": ""}
"""Beyond noise in favour, beyond noise against."""

_AT = "{}, mean over the corruptions of severity {}"
CLEAN = (
    Column("accuracy", "Accuracy, %", 2, "high", "the share of examples whose most probable class is right", True),
    Column("nll", "NLL", 4, "low", "mean negative log-likelihood of the labels, in nats"),
    Column("brier", "Brier", 4, "low", "squared distance of probabilities from the label, summed over classes"),
    Column("ece", "ECE", 4, "low", "expected calibration error, 15 bins"),
)
CORRUPTED = (
    Column("corrupted_accuracy", "cA, %", 2, "high", "accuracy, mean over the corrupted test sets", True),
    Column("corrupted_nll", "cNLL", 4, "low", "NLL, mean over the corrupted test sets"),
    Column("corrupted_brier", "cBrier", 4, "low", "Brier score, mean over the corrupted test sets"),
    Column("corrupted_ece", "cECE", 4, "low", "calibration error, mean over the corrupted test sets"),
)
UNCALIBRATED = (
    Column("temperature", "Temperature", 3, "", "the one that suits the whole test set; above 1: overconfident"),
    Column("raw_nll", "raw NLL", 4, "low", "without temperature"),
    Column("raw_brier", "raw Brier", 4, "low", "without temperature"),
    Column("raw_ece", "raw ECE", 4, "low", "without temperature"),
    Column("raw_corrupted_nll", "raw cNLL", 4, "low", "without temperature"),
    Column("raw_corrupted_brier", "raw cBrier", 4, "low", "without temperature"),
    Column("raw_corrupted_ece", "raw cECE", 4, "low", "without temperature"),
    Column("aurc", "AURC", 4, "low", "area under the risk-coverage curve"),
    Column("corrupted_aurc", "cAURC", 4, "low", "AURC, mean over the corrupted test sets"),
)
MEMBERS = (
    Column("member_accuracy", "Member accuracy, %", 2, "high", "mean over the members, each on its own", True),
    Column("disagreement", "Disagreement, %", 2, "", "pairs of members that name different classes", True),
    Column("mutual_information", "Mutual information", 4, "", "of prediction and member, in nats"),
    Column("predictive_variance", "Predictive variance", 4, "", "of the members' probabilities, summed over classes"),
    Column("map_similarity", "Map similarity", 3, "", "cosine of two members' class activation maps"),
    Column("corrupted_map_similarity", "Map similarity, corrupted", 3, "", "the same on corrupted pictures"),
)
BY_SEVERITY = (
    *(
        Column(f"accuracy_at_severity_{s}", f"A at {s}, %", 2, "high", _AT.format("accuracy", s), True)
        for s in SEVERITIES
    ),
    *(Column(f"nll_at_severity_{s}", f"NLL at {s}", 4, "low", _AT.format("NLL", s)) for s in SEVERITIES),
)
EQUIVALENT = "how many members of Deep Ensembles have the same calibrated NLL"


def comparison(results: dict[str, Any]) -> Table:
    """One row a setting, with the best in bold."""
    settings = results["settings"]
    columns = [c for c in (*CLEAN, *CORRUPTED) if _known(settings, c)]
    heads = [
        ColumnHeader("Method", numeric=False),
        ColumnHeader("Members"),
        ColumnHeader("Seeds"),
        *map(head_of, columns),
    ]
    rows = [
        [_name(k, s), _count(s["members"]), _count(len(s["seeds"])), *mean_cells(s, columns)]
        for k, s in _each(settings)
    ]
    if any("deep_ensemble_equivalent" in s for s in settings):
        heads.append(ColumnHeader("DEE", "high", EQUIVALENT))
        for row, s in zip(rows, settings, strict=True):
            row.append(_equivalent(s.get("deep_ensemble_equivalent")))
    title = "All settings" if len(settings) > 1 else "On the test sets"
    note = " ".join(part for part in (_seeds(settings), _corrupted_sets(results)) if part)
    return Table("comparison", title, tuple(heads), with_best(heads, rows), note)


def averages(name: str, title: str, results: dict[str, Any], columns: Sequence[Column]) -> Table:
    """One row a setting, of those columns that are known."""
    settings = results["settings"]
    known = [c for c in columns if _known(settings, c)]
    heads = [ColumnHeader("Method", numeric=False), *map(head_of, known)]
    rows = [[_name(k, s), *mean_cells(s, known)] for k, s in _each(settings)]
    return Table(name, title, tuple(heads), with_best(heads, rows), _seeds(settings))


def differences(
    results: dict[str, Any], columns: Sequence[Column] = (*CLEAN, *CORRUPTED), name: str = "differences"
) -> Table | None:
    """From Deep Ensembles, paired by seed; None if there is nothing to compare."""
    compared = [(k, s) for k, s in _each(results["settings"]) if s.get("differences")]
    if not compared:
        return None
    columns = [c for c in columns if any(c.key in s["differences"] for _, s in compared)]
    heads = [ColumnHeader("Method", numeric=False), *map(head_of, columns)]
    rows = [[_name(k, s), *(difference_cell(c, s["differences"].get(c.key)) for c in columns)] for k, s in compared]
    shared = [next(iter(s["differences"].values()))["seeds"] for _, s in compared]
    alike = len(set(shared)) == 1
    if not alike:
        heads.insert(1, ColumnHeader("Shared seeds"))
        for row, count in zip(rows, shared, strict=True):
            row.insert(1, _count(count))
    several = any(d["low"] is not None for _, s in compared for d in s["differences"].values())
    note = (
        f"Mean of the differences on the same seed{f', over {shared[0]} seeds,' if alike else ','} with their 95 % "
        "confidence interval (Student’s t). ▲ better and ▼ worse: the interval excludes 0. No mark: no difference "
        "beyond noise."
        if several
        else "One shared seed: differences without an interval, which say nothing about noise."
    )
    others = dict.fromkeys(key for _, s in compared for key in s.get("otherwise_differing", ()))
    if others:
        note += f" The recipes differ in more than the method: {', '.join(others)}."
    titles = dict.fromkeys(s["against"] for _, s in compared)
    title = f"Differences from {in_words(titles)}"
    return Table(name, title, tuple(heads), tuple(map(tuple, rows)), note)


def details(results: dict[str, Any]) -> list[Table]:
    """Metrics without calibration, and what is known of the members."""
    return [
        averages("uncalibrated", "Without calibration", results, UNCALIBRATED),
        averages("members-table", "Members and their diversity", results, MEMBERS),
    ]


def verdict(column: Column, difference: dict[str, Any]) -> Significance:
    """Whether a paired difference goes beyond noise, and in whose favour; nothing for one seed."""
    low, high = difference["low"], difference["high"]
    if low is None or not column.better:
        return ""
    if low <= 0 <= high:
        return "unclear"
    return "better" if (low > 0) == (column.better == "high") else "worse"


def fixed(value: float, digits: int, sign: bool = False) -> str:
    """With so many digits and a true minus; never −0.00."""
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    if float(text) == 0:
        text = text.replace("-", "+" if sign else "")
    return text.replace("-", MINUS)


def cut(text: str, length: int) -> str:
    """A title that fits."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def in_words(parts: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def head_of(column: Column) -> ColumnHeader:
    return ColumnHeader(column.title, column.better, column.meaning)


def _each(settings: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(settings))


def _known(settings: Sequence[dict[str, Any]], column: Column) -> bool:
    return any(column.key in s["metrics"] for s in settings)


def _name(k: int, setting: dict[str, Any]) -> TableCell:
    return TableCell(setting["title"], style=k)


def _count(number: int) -> TableCell:
    return TableCell(str(number), value=number)


def mean_cells(setting: dict[str, Any], columns: Sequence[Column]) -> list[TableCell]:
    cells = []
    for column in columns:
        found = setting["metrics"].get(column.key)
        if found is None:
            cells.append(TableCell("–"))
            continue
        spread = "" if found["sd"] is None else column.text(found["sd"])
        cells.append(TableCell(column.text(found["mean"]), spread, value=found["mean"]))
    return cells


def difference_cell(column: Column, found: dict[str, Any] | None) -> TableCell:
    if found is None:
        return TableCell("–")
    text, low, high = column.text(found["mean"], sign=True), found["low"], found["high"]
    aside = "" if low is None else f"[{column.text(low)}, {column.text(high)}]"
    return TableCell(text, aside=aside, value=found["mean"], verdict=verdict(column, found))


def _equivalent(worth: float | str | None) -> TableCell:
    if worth is None:
        return TableCell("–")
    if isinstance(worth, str):  # more than 5
        return TableCell(worth.replace("more than", ">"), value=math.inf)
    return TableCell(fixed(worth, 1), value=worth)


def with_best(heads: Sequence[ColumnHeader], rows: Sequence[Sequence[TableCell]]) -> tuple[tuple[TableCell, ...], ...]:
    """The best of each column marked; what prints as the same number is as good."""
    marked = [list(row) for row in rows]
    for place, head in enumerate(heads):
        values = [(row[place].value, row[place].text) for row in rows if row[place].value is not None]
        if not head.better or len(values) < 2:
            continue
        pick = max if head.better == "high" else min
        best = pick(values, key=lambda pair: pair[0] or 0.0)[1]
        for row in marked:
            row[place] = replace(row[place], best=row[place].text == best)
    return tuple(map(tuple, marked))


def _corrupted_sets(results: dict[str, Any]) -> str:
    """How many there are, where that is not all."""
    sets = [name for name in results["conditions"] if name.rpartition("-")[0] in CORRUPTIONS]
    whole = len(CORRUPTIONS) * len(SEVERITIES)
    if not 0 < len(sets) < whole:
        return ""
    return f"cA, cNLL, cBrier and cECE are of {len(sets)} corrupted test sets, not of all {whole}."


def _seeds(settings: Sequence[dict[str, Any]]) -> str:
    counts = sorted({len(s["seeds"]) for s in settings})
    if counts == [1]:
        return "One seed each."
    few = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    bold = " The best are bold." if len(settings) > 1 else ""
    return f"Mean ± standard deviation over {few} seeds.{bold}"
