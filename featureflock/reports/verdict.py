"""The verdict: one sentence about the main method and its baseline, from the declared endpoints.

    Over 10 seeds, feature-WGD is better calibrated than Deep Ensembles on corrupted images, and as accurate; …

An endpoint is better or worse if its p-value is below 0.05 after Holm's correction for all endpoints, from 3 seeds on.
"As accurate" means that the 95 % interval of the difference excludes a loss of more than 0.1 points. Every endpoint has
a place in the sentence, so that nothing is left out in the method's favour.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from featureflock.evaluation.endpoints import ACCURACY_MARGIN, ENDPOINTS
from featureflock.evaluation.results import EvaluationResults, GroupResult
from featureflock.evaluation.statistics import SEEDS_FOR_SIGNIFICANCE, PairedDifference, corrected
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.reports.tables import find_column, in_words, plural, shared_seeds, significance

_Outcome = Literal["better", "worse", "as accurate", "undecided", "same", "constant"]
_Outcomes = dict[str, _Outcome]
"""By endpoint; those of corrupted images under the name of the clean metric."""
_ADJECTIVES = {
    "accuracy": ("more accurate", "less accurate"),
    "label_accuracy": ("more accurate", "less accurate"),
    "ece": ("better calibrated", "worse calibrated"),
    "label_ece": ("better calibrated", "worse calibrated"),
    "calibration_error": ("better calibrated", "worse calibrated"),
}
_ACCURACIES = ("accuracy", "label_accuracy")
_PREFIX = "corrupted_"


class Verdict(NamedTuple):
    sentence: str
    basis: str = ""
    """How it was tested, and what weakens it; empty without a comparison."""


def verdict(results: EvaluationResults) -> Verdict:
    """The result in one sentence, and how it was tested."""
    if len(results.groups) == 1:
        return Verdict(_only(results.groups[0], results.task))
    main = main_group(results)
    if main is None:
        baseline = next((g.baseline for g in results.groups if g.baseline is not None), DeepEnsembles.title)
        return Verdict(f"No method is compared with another, because none shares a seed with {_name(baseline)}.")
    declared = results.endpoints or [key for key in ENDPOINTS.get(results.task, ()) if key in main.differences]
    differences = corrected(main.differences, declared)
    tested = {key: differences[key] for key in declared if key in differences and find_column(key).better}
    method, baseline, seeds = _name(main.title), _name(main.baseline or ""), shared_seeds(main)
    if not tested:
        return Verdict(f"{method} and {baseline} have no endpoint in common, so there is no verdict.")
    places = _places(tested)
    if seeds < SEEDS_FOR_SIGNIFICANCE:
        few = f"fewer than the {SEEDS_FOR_SIGNIFICANCE} that a test of significance needs"
        return Verdict(f"{method} and {baseline} share {plural(seeds, 'seed')} on {_all(places)}, {few}.")
    sentence = f"Over {seeds} seeds, {method} {_clauses(places, baseline)}."
    return Verdict(sentence, _basis(results, main, tested, places))


def main_group(results: EvaluationResults) -> GroupResult | None:
    """The method that the verdict is about, chosen by name and place, never by its results; None if none is compared.

    The last row of feature-WGD, rows called tuned before others: studies list the paper's setting first. Without
    feature-WGD, the first ensemble that is compared.
    """
    compared = [group for group in results.groups if group.differences]
    ours = [group for group in compared if FeatureWGD.title in (group.method, group.title.split(",")[0])]
    tuned = [group for group in ours if "tuned" in group.title]
    ensembles = [group for group in compared if group.members > 1]
    chosen = tuned or ours or ensembles[:1] or compared[:1]
    return chosen[-1] if chosen else None


def _places(tested: Mapping[str, PairedDifference]) -> dict[str, _Outcomes]:
    """Outcomes by the words for their test sets."""
    parts: tuple[_Outcomes, _Outcomes] = ({}, {})
    for key, difference in tested.items():
        parts[key.startswith(_PREFIX)][key.removeprefix(_PREFIX)] = _outcome(key, difference)
    clean, other = parts
    if not other:
        return {"the clean test set": clean}
    places = {"clean images": clean, "corrupted images": other}
    return {words: outcomes for words, outcomes in places.items() if outcomes}


def _all(places: Mapping[str, _Outcomes]) -> str:
    return "clean and corrupted images" if len(places) > 1 else next(iter(places))


def _outcome(key: str, difference: PairedDifference) -> _Outcome:
    metric = find_column(key)
    if difference.low is None:
        return "same" if metric.text(difference.mean) == metric.text(0.0) else "constant"
    if outcome := significance(metric, difference):
        return outcome
    harmless = key.removeprefix(_PREFIX) in _ACCURACIES and difference.low > -ACCURACY_MARGIN
    return "as accurate" if harmless else "undecided"


def _clauses(places: Mapping[str, _Outcomes], baseline: str) -> str:
    """What follows the name of the method: a clause for each place, or one if they have the same outcomes."""
    if len({tuple(outcomes.items()) for outcomes in places.values()}) == 1:
        places = {_all(places): next(iter(places.values()))}
    decided = sorted(places.items(), key=lambda item: not {"better", "worse"} & {*item[1].values()})
    (first, outcomes), *others = decided
    head, tail = _clause(outcomes, baseline)
    clauses = [f"{head} on {first}{tail}", *(f"on {place} it {''.join(_clause(part))}" for place, part in others)]
    return "; ".join(clauses)


def _clause(outcomes: _Outcomes, baseline: str = "") -> tuple[str, str]:
    """What stands before and after the place; a clause after the first has no baseline."""
    keys = {outcome: [key for key, found in outcomes.items() if found == outcome] for outcome in outcomes.values()}
    than, as_, from_ = (f" {word} {baseline}" if baseline else "" for word in ("than", "as", "from"))
    better, worse = (_adjectives(keys.get(side, []), side) for side in ("better", "worse"))
    same, constant, undecided = (_names(keys.get(kind, [])) for kind in ("same", "constant", "undecided"))
    undecided = " or ".join(undecided.rsplit(" and ", 1))
    heads = {
        "decided": f"is {' but '.join(filter(None, (better, worse)))}{than}" if better or worse else "",
        "as accurate": f"is as accurate{as_}" if "as accurate" in keys else "",
        "undecided": f"shows no significant difference{from_} in {undecided}" if undecided else "",
        "same": f"has the same {same}{as_} on every seed," if same else "",
        "constant": f"differs{from_} in {constant} equally on every seed, which is not tested," if constant else "",
    }
    tails = {
        "as accurate": ", and as accurate",
        "undecided": f", with no significant difference in {undecided}",
        "same": f", with the same {same} on every seed",
        "constant": f", with a difference in {constant} that is the same on every seed and not tested",
    }
    first, *others = [kind for kind, text in heads.items() if text]
    head = heads[first] if baseline else heads[first].removesuffix(",")
    return head, "".join(tails[kind] for kind in others)


def _adjectives(keys: Sequence[str], side: Literal["better", "worse"]) -> str:
    """more accurate, better calibrated and better in NLL and Brier score."""
    words = [_ADJECTIVES[key][side == "worse"] for key in keys if key in _ADJECTIVES]
    scores = _names([key for key in keys if key not in _ADJECTIVES])
    words += [f"{side} in {scores}"] if scores else []
    return in_words(words) if words else ""


def _names(keys: Sequence[str]) -> str:
    """accuracy, NLL and Brier score; empty without keys."""
    titles = [find_column(key).title.removesuffix(", %") for key in keys]
    names = {"Accuracy": "accuracy", "Label accuracy": "label accuracy", "Brier": "Brier score"}
    return in_words(names.get(title, title) for title in titles) if titles else ""


def _name(title: str) -> str:
    """The title of a row within a sentence: feature-WGD (tuned) instead of feature-WGD, tuned."""
    before, comma, after = title.partition(", ")
    return f"{before} ({after})" if comma and "(" not in title else title


def _basis(
    results: EvaluationResults,
    main: GroupResult,
    tested: Mapping[str, PairedDifference],
    places: Mapping[str, _Outcomes],
) -> str:
    """How the verdict was tested, and what weakens it."""
    baseline = next((group for group in results.groups if group.title == main.baseline), None)
    holm = any(difference.p_holm is not None for difference in tested.values())
    how = f"p < 0.05 after Holm’s correction for {plural(len(tested), 'endpoint')}" if holm else "95 % intervals"
    parts = [f"Paired by seed; significant by {how}."]
    hidden = {
        key: significance(find_column(key), difference._replace(p_holm=None))
        for key, difference in tested.items()
        if not significance(find_column(key), difference)
    }
    for side in ("worse", "better"):
        keys = [key for key, found in hidden.items() if found == side]
        if keys:
            titles = in_words(find_column(key).title.removesuffix(", %") for key in keys)
            parts.append(f"Without the correction, {titles} would be significantly {side}.")
    if any("as accurate" in outcomes.values() for outcomes in places.values()):
        parts.append(f"As accurate: the 95 % interval excludes a loss of more than {100 * ACCURACY_MARGIN:g} points.")
    if baseline is not None and baseline.members != main.members:
        parts.append(f"The ensembles have {main.members} and {plural(baseline.members, 'member')}.")
    if main.baseline_differs_in:
        parts.append(f"The recipes differ in more than the method: {', '.join(main.baseline_differs_in)}.")
    at_bound = {
        "clean": any(group is not None and group.temperature_at_bound for group in (main, baseline)),
        "corrupted": any(group is not None and group.corrupted_temperature_at_bound for group in (main, baseline)),
    }
    if any(at_bound.values()):
        where = in_words(kind for kind, found in at_bound.items() if found)
        parts.append(f"A fitted temperature is at its bound, so the calibrated {where} scores are not reliable.")
    if sum(bool(group.differences) for group in results.groups) > 1:
        parts.append("The other methods are in the figure and the tables below.")
    return " ".join(parts)


_HEADLINES = {"regression": "rmse", "multi-label": "label_accuracy"}


def _only(group: GroupResult, task: str) -> str:
    """What was measured of a single method."""
    over = f"Over {len(group.seeds)} seeds, " if len(group.seeds) > 1 else ""
    metric = find_column(_HEADLINES.get(task, "accuracy"))
    value, member = group.metrics[metric.key].mean, group.metrics[f"member_{metric.key}"].mean
    if metric.key != "accuracy":
        unit, title = "\u202f%" * metric.percent, metric.title.removesuffix(", %")
        alone = f"; its members have {metric.text(member)}{unit} on average" if group.members > 1 else ""
        what = f"{title} {metric.text(value)}{unit} on the test set{alone}"
        return f"{over}{group.title} with {plural(group.members, 'member')} has {what}."
    correct = f"classifies {100 * value:.2f} % of the test examples correctly"
    if group.members == 1:
        return f"{over}{group.title}, a single network, {correct}."
    gain = f"{100 * abs(value - member):.2f} points {'more' if value >= member else 'less'}"
    return f"{over}{group.title} with {group.members} members {correct}, {gain} than its members on average."
