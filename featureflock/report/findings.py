"""What the numbers say, in a few plain sentences, and no more than they do."""

from typing import Any, NamedTuple

from featureflock.report.tables import CLEAN, CORRUPTED, Column, comparison, in_words, verdict

_TILES = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "corrupted_accuracy": "Accuracy, corrupted (cA)",
    "corrupted_nll": "NLL, corrupted (cNLL)",
}
_MANY = 10
"""From so many intervals on, it is said that some exclude 0 by chance."""


class Tile(NamedTuple):
    """A number to see first."""

    title: str
    value: str
    spread: str
    who: str


class Sentence(NamedTuple):
    lead: str
    """What it is about; may be empty."""
    text: str


def tiles(results: dict[str, Any]) -> list[Tile]:
    """The best of a few metrics, and whose it is."""
    table = comparison(results)
    found = []
    for place, head in enumerate(table.heads):
        column = next((c for c in (*CLEAN, *CORRUPTED) if c.title == head.title), None)
        if column is None or column.key not in _TILES:
            continue
        best = [row for row in table.rows if row[place].best] or list(table.rows[:1])
        cell = best[0][place]
        who = in_words(row[0].text for row in best) if len(best) <= 2 else f"{len(best)} settings alike"
        found.append(Tile(_TILES[column.key], cell.text + ("\u202f%" if column.percent else ""), cell.spread, who))
    return found


def sentences(results: dict[str, Any]) -> list[Sentence]:
    """Which setting is best on what, and whether differences from Deep Ensembles go beyond noise."""
    settings = results["settings"]
    said = [Sentence("", _best(results) if len(settings) > 1 else _alone(settings[0]))]
    compared = [s for s in settings if s.get("differences")]
    paired = [s for s in compared if _count(s) > 1]
    said += _against_all(paired)
    if all(len(s["seeds"]) == 1 for s in settings):
        order = "another seed may order them otherwise" if len(settings) > 1 else "another seed may differ"
        said.append(Sentence("One seed:", f"it says nothing about noise; {order}."))
    elif any(s not in paired for s in compared):
        names = in_words(s["title"] for s in compared if s not in paired)
        said.append(Sentence(f"{names}:", f"one seed shared with {compared[0]['against']} says nothing about noise."))
    if len(settings) > 1 and not compared:
        said.append(Sentence("", "There are no Deep Ensembles of the same seeds among the runs to compare with."))
    intervals = sum(c.key in s["differences"] for s in paired for c in (*CLEAN, *CORRUPTED))
    if intervals >= _MANY:
        chance = "about one in twenty excludes 0 by chance alone where there is no difference"
        said.append(Sentence("", f"There are {intervals} such intervals at 95 %, of which {chance}."))
    return said


def _best(results: dict[str, Any]) -> str:
    table = comparison(results)
    columns = {c.title: c for c in (*CLEAN, *CORRUPTED)}
    by_winner: dict[tuple[str, ...], list[str]] = {}
    for place, head in enumerate(table.heads):
        winners = tuple(row[0].text for row in table.rows if row[place].best)
        if head.title in columns and winners:
            by_winner.setdefault(winners, []).append(_name(columns[head.title]))
    parts = []
    for names, metrics in by_winner.items():
        who = in_words(names) if len(names) <= 3 else f"{len(names)} of {len(table.rows)} settings"
        parts.append(f"{who} {'is' if len(names) == 1 else 'are equally'} best on {in_words(metrics)}")
    return f"By the means over seeds, {'; '.join(parts)}." if _seeds(results) > 1 else f"{'; '.join(parts)}."


def _against_all(paired: list[dict[str, Any]]) -> list[Sentence]:
    """Of settings with at least two shared seeds; what is the same of several is said once."""
    by_text: dict[tuple[int, str], list[str]] = {}
    for s in paired:
        by_text.setdefault((_count(s), _against(s)), []).append(s["title"])
    return [
        Sentence(f"{in_words(titles)} against {paired[0]['against']}, over {count} shared seeds:", text)
        for (count, text), titles in by_text.items()
    ]


def _against(setting: dict[str, Any]) -> str:
    sides: dict[str, list[str]] = {"better": [], "worse": [], "unclear": []}
    for column in (*CLEAN, *CORRUPTED):
        found = setting["differences"].get(column.key)
        if found is not None:
            side = verdict(column, found)
            unit = " points" if column.percent else ""
            amount = f" ({column.text(found['mean'], sign=True)}{unit})" if side != "unclear" else ""
            sides[side].append(f"{_name(column)}{amount}")
    parts = [f"{side} beyond noise on {in_words(sides[side])}" for side in ("better", "worse") if sides[side]]
    if not parts:
        return "no difference beyond noise on any metric."
    if sides["unclear"]:
        parts.append(f"no difference beyond noise on {in_words(sides['unclear'])}")
    return f"{'; '.join(parts)}."


def _alone(setting: dict[str, Any]) -> str:
    metrics = setting["metrics"]
    accuracy, member = metrics["accuracy"]["mean"], metrics["member_accuracy"]["mean"]
    if setting["members"] == 1:
        return f"{setting['title']}, a single network, is right on {100 * accuracy:.2f} % of the test examples."
    gain = f"{100 * abs(accuracy - member):.2f} points {'more' if accuracy >= member else 'less'}"
    return (
        f"{setting['title']} with {setting['members']} members is right on {100 * accuracy:.2f} % of the test "
        f"examples, {gain} than its members on their own."
    )


def _name(column: Column) -> str:
    return column.title.removesuffix(", %").replace("Accuracy", "accuracy")


def _count(setting: dict[str, Any]) -> int:
    return int(next(iter(setting["differences"].values()))["seeds"])


def _seeds(results: dict[str, Any]) -> int:
    return max(len(s["seeds"]) for s in results["settings"])
