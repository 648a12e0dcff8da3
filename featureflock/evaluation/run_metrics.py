"""All metrics of a run, from its predictions, and what several runs have in common.

    results["runs"]      one entry a run: clean, views, corrupted, unfamiliar, and `summary`, a number for each metric
    results["settings"]  one entry for runs that differ by their seed alone: mean ± sd of each number of the summary,
                         and the differences from Deep Ensembles, paired by seed

Accuracies, ECE and the like are shares from 0 to 1, NLL in nats. Metrics are those after temperature scaling with
test-time cross-validation, unless they are called raw. Those of corrupted test sets are means over all of them: cA,
cNLL, cBrier, cECE.

Shapes: n members, B examples, C classes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featureflock.evaluation.calibration import BOUNDS, calibrated, fit_temperature, tempered
from featureflock.evaluation.cam_cache import Which, likeness, read_maps
from featureflock.evaluation.dee import deep_ensemble_equivalent
from featureflock.evaluation.diversity import member_diversity
from featureflock.evaluation.metrics.classification import (
    Reliability,
    Scores,
    average,
    mean_scores,
    member_accuracy,
    reliability,
    risk_coverage,
    scores,
)
from featureflock.evaluation.ood import out_of_distribution
from featureflock.evaluation.predictions import Predictions, read
from featureflock.evaluation.runs import RunGroup, TrainedRun, differing
from featureflock.evaluation.statistics import mean, paired_differences
from featureflock.evaluation.test_sets import EvaluationSet
from featureflock.evaluation.views import (
    covered_views,
    first_view_share,
    view_difference_by_input,
    view_difference_on_average,
)
from featureflock.methods import DeepEnsembles

_WINDOWS = 5
"""Choices of members for each size of a smaller ensemble."""
_POINTS = 50
"""Of a risk-coverage curve."""


def measure_run(
    run: TrainedRun, name: str, conditions: Sequence[EvaluationSet], mapped: Mapping[Which, list[EvaluationSet]]
) -> dict[str, Any]:
    """All metrics of a run whose predictions are on the disk; the first condition is the clean test set.

    `name` is what to call the run.
    """
    clean = read(run, conditions[0])
    probs = clean.log_probs.double().exp()
    corrupted: dict[str, dict[str, Any]] = {}
    unfamiliar: dict[str, Any] = {}
    views: dict[str, Predictions] = {}
    for condition in conditions[1:]:
        there = read(run, condition)
        if condition.is_unfamiliar:
            found = out_of_distribution(probs, there.log_probs.double().exp())
            kind = condition.name.removeprefix("unfamiliar-")
            unfamiliar[kind] = {measure: part._asdict() for measure, part in found._asdict().items()}
        elif condition.view is not None:
            views[condition.view] = there
        else:
            corruption, _, severity = condition.name.rpartition("-")
            corrupted.setdefault(corruption, {})[severity] = _scored(there)
    entry: dict[str, Any] = {
        "folder": name,
        "method": run.method,
        "seed": run.seed,
        "members": len(clean.log_probs),
        "clean": _scored(clean) | _in_detail(clean),
    }
    if views:
        entry["views"] = views_of(clean, views)
    if corrupted:
        entry["corrupted"] = corrupted
        entry["corrupted_mean"] = _mean_over_sets(corrupted)
    if unfamiliar:
        entry["unfamiliar"] = unfamiliar
    there_are = {which: read_maps(run, which, chosen) for which, chosen in mapped.items()}
    maps = {which: likeness(kept.maps) for which, kept in there_are.items() if kept is not None and len(kept.maps) > 1}
    if maps:
        entry["maps"] = maps
    return entry | {
        "summary": _summary(entry),
        "training": run.result,
        "recipe": run.recipe,
        "environment": run.environment,
    }


def compare(rows: Sequence[RunGroup], measured: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of the runs of each setting, differences from Deep Ensembles, and how many of their members it is worth.

    Compared is with those Deep Ensembles that share seeds with a setting and differ least from it otherwise. What it is
    worth is told by the largest of those that differ least. `measured` is what `measure_run` gives, by run.
    """
    compared = []
    for row in rows:
        baseline, curve = _baseline(row, rows), _curve(row, rows, measured)
        summaries = {run.seed: measured[str(run)]["summary"] for run in row.runs}
        first = measured[str(row.runs[0])]
        entry: dict[str, Any] = {
            "title": row.title,
            "method": row.runs[0].method,
            "members": first["members"],
            "runs": [measured[str(run)]["folder"] for run in row.runs],
            "seeds": list(summaries),
            "metrics": {key: mean([s[key] for s in summaries.values()])._asdict() for key in first["summary"]},
        }
        if baseline is not None:
            theirs = {run.seed: measured[str(run)]["summary"] for run in baseline.runs}
            entry["against"] = baseline.title
            entry["otherwise_differing"] = differing(row.runs[0], baseline.runs[0])
            entry["differences"] = paired_differences(summaries, theirs)
        if curve and not any(_at_a_bound(measured[str(run)]["clean"]) for run in row.runs):
            worth = deep_ensemble_equivalent(-entry["metrics"]["nll"]["mean"], curve)
            entry["deep_ensemble_equivalent"] = worth if math.isfinite(worth) else f"more than {max(curve)}"
        compared.append(entry)
    return compared


def remarks(entries: Sequence[dict[str, Any]], asked: int) -> list[str]:
    """What a reader of the numbers should know."""
    said = []
    fewest = min(entry["clean"]["examples"] for entry in entries)
    if fewest < asked:
        said.append(f"{asked - fewest} of {asked} test examples cannot be read and are left out.")
    sets = [scored for entry in entries for scored in (entry["clean"], *_corrupted_sets(entry.get("corrupted", {})))]
    bounded = sum(map(_at_a_bound, sets))
    if bounded:
        said.append(
            f"On {bounded} of {len(sets)} test sets of all runs some half was predicted so well, or no better than by "
            f"chance, that its temperature is at a bound, {BOUNDS[0]:g} or {BOUNDS[1]:g}. Their calibrated NLL depends "
            "on that bound: look at the raw NLL. Where the clean test set is one of them, no deep-ensemble equivalent "
            "is given."
        )
    return said


def _scored(predictions: Predictions) -> dict[str, Any]:
    log_p = average(predictions.log_probs)
    found = calibrated(log_p, predictions.labels)
    return {
        "calibrated": found.scores._asdict(),
        "raw": scores(log_p, predictions.labels)._asdict(),
        "temperatures": list(found.temperatures),
        "examples": len(predictions.labels),
    }


def _in_detail(clean: Predictions) -> dict[str, Any]:
    """What is shown of the clean test set only."""
    log_p, y, probs = average(clean.log_probs), clean.labels, clean.log_probs.double().exp()
    temperature = fit_temperature(log_p, y)
    detail: dict[str, Any] = {
        "temperature": temperature,
        "member_accuracy": member_accuracy(probs, y),
        "reliability": {
            "raw": _as_lists(reliability(log_p.exp(), y)),
            "calibrated": _as_lists(reliability(tempered(log_p, temperature).exp(), y)),
        },
        "risk_coverage": _risk_coverage(log_p.exp(), y),
        "by_size": _by_size(clean),
    }
    if len(probs) > 1:
        detail["diversity"] = member_diversity(probs)._asdict()
    return detail


def views_of(clean: Predictions, views: Mapping[str, Predictions]) -> dict[str, Any]:
    """What is left with one view only and, of two views, which one drives each member."""
    only: dict[str, dict[str, Any]] = {
        name: {
            "raw": scores(average(part.log_probs), part.labels)._asdict(),
            "member_accuracy": member_accuracy(part.log_probs.double().exp(), part.labels),
        }
        for name, part in views.items()
    }
    whole = member_accuracy(clean.log_probs.double().exp(), clean.labels)
    by_view = [part["member_accuracy"] for part in only.values()]
    classes = clean.log_probs.shape[-1]
    found: dict[str, Any] = {"only": only, "chance": 1 / classes, "covered": covered_views(whole, by_view, classes)}
    if len(views) == 2:
        share_nb = first_view_share(clean.log_probs, *(part.log_probs for part in views.values()))
        found["member_share"] = share_nb.mean(1).tolist()
        found["difference_by_input"] = view_difference_by_input(share_nb)
        found["difference_on_average"] = view_difference_on_average(share_nb)
    return found


def _by_size(clean: Predictions) -> dict[str, Any]:
    """Scores of ensembles of the first 1, 2, …, n members in a circle: the mean over up to 5 places to start at."""
    n = len(clean.log_probs)
    sizes = {}
    for size in range(1, n + 1):
        starts = [0] if size == n else sorted({k * n // min(n, _WINDOWS) for k in range(min(n, _WINDOWS))})
        parts = [average(clean.log_probs[[(start + i) % n for i in range(size)]]) for start in starts]
        found = [calibrated(part, clean.labels).scores for part in parts]
        sizes[str(size)] = mean_scores(found)._asdict()
    return sizes


def _summary(entry: dict[str, Any]) -> dict[str, float]:
    """A number for each metric."""
    clean = entry["clean"]
    summary: dict[str, float] = {**clean["calibrated"]}
    summary |= {f"raw_{key}": clean["raw"][key] for key in ("nll", "brier", "ece")}
    summary["temperature"] = clean["temperature"]
    if "corrupted_mean" in entry:
        of_sets = entry["corrupted_mean"]
        summary |= {f"corrupted_{key}": value for key, value in of_sets["calibrated"].items()}
        summary |= {f"raw_corrupted_{key}": of_sets["raw"][key] for key in ("nll", "brier", "ece")}
        for severity, found in _mean_by_severity(entry["corrupted"]).items():
            summary |= {f"{key}_at_severity_{severity}": found[key] for key in ("accuracy", "nll")}
    summary["member_accuracy"] = mean(clean["member_accuracy"]).mean
    summary |= clean.get("diversity", {})
    summary |= _views_summary(entry.get("views"))
    for which, key in (("clean", "map_similarity"), ("corrupted", "corrupted_map_similarity")):
        if which in entry.get("maps", {}):
            summary[key] = entry["maps"][which]["similarity"]
    for name, measures in entry.get("unfamiliar", {}).items():
        summary |= {f"auroc_{name}": measures["entropy"]["auroc"]}
    return summary


def _views_summary(views: dict[str, Any] | None) -> dict[str, float]:
    """`<view>_share` is of the first view."""
    if views is None:
        return {}
    found: dict[str, float] = {}
    for view, part in views["only"].items():
        found[f"only_{view}_accuracy"] = part["raw"]["accuracy"]
        found[f"only_{view}_member_accuracy"] = mean(part["member_accuracy"]).mean
        found[f"only_{view}_best_member_accuracy"] = max(part["member_accuracy"])
    found["covered_views"] = float(sum(views["covered"]))
    if "member_share" in views:
        found[f"{next(iter(views['only']))}_share"] = mean(views["member_share"]).mean
        found |= {f"view_{key}": views[key] for key in ("difference_by_input", "difference_on_average")}
    return found


def _mean_over_sets(corrupted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    sets = _corrupted_sets(corrupted)
    return {kind: mean_scores([Scores(**part[kind]) for part in sets])._asdict() for kind in ("calibrated", "raw")}


def _mean_by_severity(corrupted: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Calibrated scores at each severity, means over corruptions."""
    severities = sorted({severity for by_severity in corrupted.values() for severity in by_severity})
    parts = {s: [Scores(**by[s]["calibrated"]) for by in corrupted.values() if s in by] for s in severities}
    return {severity: mean_scores(found)._asdict() for severity, found in parts.items()}


def _corrupted_sets(corrupted: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for by_severity in corrupted.values() for part in by_severity.values()]


def _baseline(row: RunGroup, rows: Sequence[RunGroup]) -> RunGroup | None:
    """The Deep Ensembles to compare a setting with; None for Deep Ensembles."""
    if row.runs[0].method == DeepEnsembles.title:
        return None
    seeds = {run.seed for run in row.runs}

    def closeness(other: RunGroup) -> tuple[int, int, int]:
        shared = len(seeds & {run.seed for run in other.runs})
        return -min(shared, 1), len(differing(row.runs[0], other.runs[0])), -shared

    return min(_deep_ensembles(rows), key=closeness, default=None)


def _curve(row: RunGroup, rows: Sequence[RunGroup], measured: Mapping[str, dict[str, Any]]) -> dict[int, float]:
    """The calibrated log-likelihood of Deep Ensembles by their size; empty where it cannot be relied upon."""

    def closeness(other: RunGroup) -> tuple[int, int]:
        return len(differing(row.runs[0], other.runs[0])), -measured[str(other.runs[0])]["members"]

    best = min(_deep_ensembles(rows), key=closeness, default=None)
    entries = [measured[str(run)] for run in best.runs] if best is not None else []
    if not entries or any(_at_a_bound(entry["clean"]) for entry in entries):
        return {}
    return _likelihood_by_size(entries)


def _deep_ensembles(rows: Sequence[RunGroup]) -> list[RunGroup]:
    return [row for row in rows if row.runs[0].method == DeepEnsembles.title]


def _at_a_bound(scored: dict[str, Any]) -> bool:
    """Whether some half was predicted so well, or so badly, that its temperature is as far as it goes."""
    return any(temperature in BOUNDS for temperature in scored["temperatures"])


def _likelihood_by_size(entries: list[dict[str, Any]]) -> dict[int, float]:
    """The calibrated log-likelihood by the number of members, mean over runs."""
    sizes = entries[0]["clean"]["by_size"]
    return {int(size): -mean([e["clean"]["by_size"][size]["nll"] for e in entries]).mean for size in sizes}


def _risk_coverage(probs: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The curve at some of its points, evenly spread."""
    curve = risk_coverage(probs, labels)
    places = torch.linspace(0, len(labels) - 1, min(_POINTS, len(labels))).round().long()
    return {"coverage": curve.coverage[places].tolist(), "risk": curve.risk[places].tolist()}


def _as_lists(r: Reliability) -> dict[str, list[float | None]]:
    """NaN, for bins without examples, becomes None: JSON has none."""
    return {
        name: [None if x != x else x for x in getattr(r, name).tolist()]
        for name in ("edges", "count", "confidence", "accuracy")
    }
