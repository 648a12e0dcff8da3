"""The paper's claims, tested by differences between rows of the studies; `repulsion_study.py add` writes claims.json.

A claim says whether a difference is higher or lower than 0, or equal to it. A 95 % interval on that side of 0 supports
the claim, one on the other side contradicts it, and one that includes 0 leaves it undecided. "Equal" is supported by an
interval within ±MARGINS. The intervals are paired by seed and not corrected for the number of differences.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from featureflock.evaluation.metrics.registry import METRICS
from featureflock.evaluation.statistics import PairedDifference, paired_difference

FOLDER = Path(__file__).parent
Expected = Literal["higher", "lower", "equal"]
Verdict = Literal["supported", "contradicted", "undecided"]
Row = dict[int, dict[str, float]]
"""Metrics by seed."""

MARGINS = {"accuracy": 0.001, "nll": 0.002, "corrupted_accuracy": 0.001, "corrupted_nll": 0.002}
BETTER: dict[str, Expected] = {key: "higher" if METRICS[key].better == "higher" else "lower" for key in MARGINS}
WORSE: dict[str, Expected] = {key: "lower" if side == "higher" else "higher" for key, side in BETTER.items()}
EQUAL: dict[str, Expected] = dict.fromkeys(BETTER, "equal")


class Comparison(NamedTuple):
    """The sum of some rows of a study minus the sum of others."""

    title: str
    study: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]


class Claim(NamedTuple):
    """What the paper claims, as the side of 0 on which the differences of each metric are."""

    text: str
    expected: dict[str, Expected]
    comparisons: tuple[Comparison, ...]


class Setting(NamedTuple):
    """One setting of the repulsion study."""

    title: str
    study: str
    tuned: str
    """Row of feature-WGD with tuned repulsion, without its end."""
    end: str
    """End of the titles of the setting's rows."""


SETTINGS = (
    Setting("Fashion-MNIST, MLP × 10", "repulsion-fashion-mnist-mlp", "feature-WGD, τ = 8", " × 10"),
    Setting("Fashion-MNIST, MLP × 5", "repulsion-fashion-mnist-mlp", "feature-WGD, τ = 8", " × 5"),
    Setting("Fashion-MNIST, CNN × 10", "repulsion-fashion-mnist-cnn", "feature-WGD, τ = 3", " × 10"),
    Setting("Fashion-MNIST, CNN × 5", "repulsion-fashion-mnist-cnn", "feature-WGD, τ = 3", " × 5"),
    Setting("CIFAR-10, fast CNN × 5", "repulsion-cifar10", "feature-WGD, τ = 10", ""),
    Setting("CIFAR-100, fast CNN × 5", "repulsion-cifar100", "feature-WGD, τ = 10", ""),
)


def _paper(than: str) -> tuple[Comparison, ...]:
    return tuple(_of(setting, "feature-WGD, paper", than) for setting in SETTINGS)


def _tuned(than: str) -> tuple[Comparison, ...]:
    return tuple(_of(setting, setting.tuned, than) for setting in SETTINGS)


def _of(setting: Setting, ours: str, theirs: str) -> Comparison:
    return Comparison(setting.title, setting.study, (ours + setting.end,), (theirs + setting.end,))


_MLP = SETTINGS[1]
_WIDE, _NARROW = "MLP 512-512 × 10", "MLP 128-128 × 10"
_WIDTHS = Comparison(
    "MLP × 10, 512 minus 128 features",
    "repulsion-strength",
    (f"τ = 10, {_WIDE}", f"Deep Ensembles, {_NARROW}"),
    (f"Deep Ensembles, {_WIDE}", f"τ = 10, {_NARROW}"),
)
_SIZES = Comparison(
    "MLP, 20 minus 10 members",
    "repulsion-size",
    ("feature-WGD × 20", "Deep Ensembles × 10"),
    ("Deep Ensembles × 20", "feature-WGD × 10"),
)
_PRIORS = tuple(
    Comparison(f"5,000 images of CIFAR-10, vs {prior.lower()}", "laptop-priors", ("Cauchy",), (prior,))
    for prior in ("Normal", "Uniform")
)
CLAIMS = (
    Claim("feature-WGD, τ = 1, is better than Deep Ensembles", BETTER, _paper("Deep Ensembles")),
    Claim("The repulsion helps, not the prior and head alone", BETTER, _tuned("feature-MAP")),
    Claim("feature-WGD is better than ADP", BETTER, (_of(_MLP, _MLP.tuned, "ADP"),)),
    Claim("It is as good as DICE if networks are wide", BETTER, (_of(_MLP, _MLP.tuned, "DICE"),)),
    Claim("function-WGD is worse than Deep Ensembles", WORSE, (_of(_MLP, "function-WGD", "Deep Ensembles"),)),
    Claim("weight-WGD equals Deep Ensembles", EQUAL, (_of(_MLP, "weight-WGD", "Deep Ensembles"),)),
    Claim("Members attend to different regions", {"map_similarity": "lower"}, _tuned("Deep Ensembles")),
    Claim("The gain grows with the width", BETTER, (_WIDTHS,)),
    Claim("The gain grows with the number of members", BETTER, (_SIZES,)),
    Claim("Cauchy is the best prior", {key: BETTER[key] for key in ("accuracy", "nll")}, _PRIORS),
)


def verdict(difference: PairedDifference, expected: Expected, margin: float = 0.0) -> Verdict:
    """What the interval of a difference says of its expected side of 0, or of its equality within ±margin."""
    low, high = difference.low, difference.high
    if low is None or high is None:
        return "undecided"
    sides = {"higher": low > 0, "lower": high < 0, "equal": -margin <= low and high <= margin}
    others = {"higher": high < 0, "lower": low > 0, "equal": low > margin or high < -margin}
    return "supported" if sides[expected] else "contradicted" if others[expected] else "undecided"


def measure() -> dict[str, Any]:
    """All differences that have results, with their verdicts."""
    rows = {study: _rows(study) for study in {of.study for claim in CLAIMS for of in claim.comparisons}}
    claims = []
    for claim in CLAIMS:
        measured = [_measure(claim.expected, of, rows[of.study]) for of in claim.comparisons]
        claims.append({"claim": claim.text, "comparisons": [of for of in measured if of["differences"]]})
    return {"claims": claims}


def _rows(study: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for run in json.loads((FOLDER / f"{study.replace('-', '_')}.json").read_text())["runs"]:
        rows.setdefault(run["title"], {})[run["seed"]] = run["numbers"]
    return rows


def _measure(sides: dict[str, Expected], comparison: Comparison, rows: dict[str, Row]) -> dict[str, Any]:
    differences = {}
    for key, expected in sides.items():
        ours, theirs = (_sum([rows.get(title, {}) for title in of], key) for of in (comparison.plus, comparison.minus))
        if (difference := paired_difference(ours, theirs)) is not None:
            measured = {"expected": expected, "verdict": verdict(difference, expected, MARGINS.get(key, 0.0))}
            differences[key] = difference._asdict() | measured
    return {"title": comparison.title, "differences": differences}


def _sum(rows: Sequence[Row], key: str) -> dict[int, float]:
    """By seed, for the seeds in which all rows have the metric."""
    values = [{seed: numbers[key] for seed, numbers in row.items() if key in numbers} for row in rows]
    return {seed: math.fsum(of[seed] for of in values) for seed in set.intersection(*map(set, values))}
