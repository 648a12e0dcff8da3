"""The results in words: the best values, and which differences vs Deep Ensembles are significant."""

from collections.abc import Sequence
from typing import NamedTuple

from featureflock.evaluation.metrics.registry import Metric
from featureflock.evaluation.results import EvaluationResults, GroupResult
from featureflock.evaluation.statistics import SEEDS_FOR_SIGNIFICANCE
from featureflock.reports.tables import (
    MAIN,
    TableCell,
    comparison,
    in_words,
    metrics_in,
    shared_seeds,
    significance,
)

_TILES = (
    *("mean_average_precision", "exact_match", "rmse", "crps", "mean_iou"),
    *("accuracy", "nll", "corrupted_accuracy", "corrupted_nll"),
)


class Finding(NamedTuple):
    """A sentence of the summary; the lead is bold and may be empty."""

    lead: str
    text: str


def tiles(results: EvaluationResults) -> list[dict[str, str]]:
    """The best value of a few metrics, and the methods that reach it."""
    entries = []
    for metric, column in _columns(results):
        if metric.key in _TILES:
            best = [cells for cells in column if cells[1].best] or column[:1]
            methods = in_words(name.text for name, _ in best) if len(best) <= 2 else f"{len(best)} methods"
            title = f"{_name(metric)} (corrupted test sets)" if metric.group == "corrupted" else metric.title
            tile = {"title": title.removesuffix(", %"), "meaning": metric.meaning, "methods": methods}
            cell = best[0][1]
            entries.append(tile | {"value": cell.text + "\u202f%" * metric.percent, "spread": cell.spread})
    return entries


def findings(results: EvaluationResults) -> list[Finding]:
    """Which method is best on which metric, and which differences vs Deep Ensembles are significant."""
    groups, metrics = results.groups, metrics_in(results, *MAIN)
    compared = [g for g in groups if g.differences]
    paired = [g for g in compared if shared_seeds(g) >= SEEDS_FOR_SIGNIFICANCE]
    sentences = [Finding("", _best(results))] if len(groups) > 1 else []
    sentences += _versus_baseline(paired, metrics)
    if all(len(g.seeds) == 1 for g in groups):
        sentences.append(Finding("One seed:", "another seed may give other values."))
    elif few := [g for g in compared if g not in paired]:
        baselines = in_words(dict.fromkeys(g.baseline or "" for g in few))
        text = f"fewer than {SEEDS_FOR_SIGNIFICANCE} seeds shared with {baselines}, too few to test for significance."
        sentences.append(Finding(f"{in_words(g.title for g in few)}:", text))
    shown = [g.differences[metric.key] for g in paired for metric in metrics if metric.key in g.differences]
    intervals = sum(difference.low is not None and difference.p_holm is None for difference in shown)
    if any(difference.p_holm is not None for difference in shown):
        text = "The endpoints are tested after Holm’s correction, row by row, at level 0.05."
        sentences.append(Finding("", text))
    if intervals >= 10:
        text = f"Of {intervals} such intervals at 95 %, about one in twenty excludes 0 even if there is no difference."
        sentences.append(Finding("", text))
    return sentences


def _columns(results: EvaluationResults) -> list[tuple[Metric, list[tuple[TableCell, TableCell]]]]:
    """Each metric of the comparison with its (method, value) cells."""
    table = comparison(results)
    places = {header.title: k for k, header in enumerate(table.headers)}
    return [(m, [(row[0], row[places[m.title]]) for row in table.rows]) for m in metrics_in(results, *MAIN)]


def _best(results: EvaluationResults) -> str:
    by_winners: dict[tuple[str, ...], list[str]] = {}
    for metric, column in _columns(results):
        if winners := tuple(name.text for name, cell in column if cell.best):
            by_winners.setdefault(winners, []).append(_name(metric))
    parts = []
    for names, metrics in by_winners.items():
        who = in_words(names) if len(names) <= 3 else f"{len(names)} of {len(results.groups)} methods"
        parts.append(f"{who} {'is' if len(names) == 1 else 'are equally'} best on {in_words(metrics)}")
    means = "By the means over seeds, " if max(len(g.seeds) for g in results.groups) > 1 else ""
    return f"{means}{'; '.join(parts)}."


def _versus_baseline(paired: Sequence[GroupResult], metrics: Sequence[Metric]) -> list[Finding]:
    """One sentence per outcome; methods with the same outcome share it."""
    titles: dict[tuple[str, int, str], list[str]] = {}
    for g in paired:
        titles.setdefault((g.baseline or "", shared_seeds(g), _outcome(g, metrics)), []).append(g.title)
    return [
        Finding(f"{in_words(names)} vs {baseline}, over {seeds} shared seeds:", outcome)
        for (baseline, seeds, outcome), names in titles.items()
    ]


def _outcome(group: GroupResult, metrics: Sequence[Metric]) -> str:
    names: dict[str, list[str]] = {"better": [], "worse": [], "equal": [], "": []}
    for metric in metrics:
        difference = group.differences.get(metric.key)
        if difference is not None and metric.better:
            equal = "equal" if difference.low is None and metric.text(difference.mean) != metric.text(0.0) else ""
            outcome, unit = significance(metric, difference) or equal, " points" * metric.percent
            amount = f" ({metric.text(difference.mean, sign=True)}{unit})" if outcome else ""
            names[outcome].append(f"{_name(metric)}{amount}")
    parts = [f"significantly {side} on {in_words(names[side])}" for side in ("better", "worse") if names[side]]
    if names["equal"]:
        parts.append(f"the same difference on every seed, so not tested, on {in_words(names['equal'])}")
    if not parts:
        return "no significant difference on any metric."
    if names[""]:
        parts.append(f"no significant difference on {in_words(names[''])}")
    return f"{'; '.join(parts)}."


def _name(metric: Metric) -> str:
    return metric.title.removesuffix(", %").replace("Accuracy", "accuracy")
