"""Comparison of runs: means over seeds, differences vs Deep Ensembles paired by seed, deep-ensemble equivalents.

    DEE = min { l ≥ 1 : CLL_DE(l) ≥ CLL }                                                   Ashukha et al. (2020)

The deep-ensemble equivalent is the size of Deep Ensembles with the same calibrated log-likelihood: CLL, the negative of
the cross-validated NLL. CLL_DE is interpolated linearly between the measured sizes, so l is a real number. An ensemble
of k members with DEE above k is better than k independent networks.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from featureflock.evaluation.calibration import BOUNDS
from featureflock.evaluation.results import GroupResult, RunResult
from featureflock.evaluation.runs import differing_fields
from featureflock.evaluation.statistics import mean, paired_differences
from featureflock.methods import DeepEnsembles


class ComparedGroup(NamedTuple):
    """Results of runs that differ in their seed alone: one row of a table."""

    title: str
    runs: Sequence[RunResult]
    fields: Mapping[str, Any]
    """Recipe fields that all the runs share; empty for predictions without a recipe."""


def deep_ensemble_equivalent(log_likelihood: float, deep_ensembles: Mapping[int, float]) -> float:
    """DEE of a calibrated log-likelihood.

    Args:
        log_likelihood: calibrated log-likelihood of the ensemble, in nats per example.
        deep_ensembles: the same of Deep Ensembles, by number of members, starting with 1.

    Returns:
        The DEE; 1 if one network is as good, math.inf if no measured size is.
    """
    curve = sorted(deep_ensembles.items())
    if not curve or curve[0][0] != 1:
        raise ValueError(f"The curve of Deep Ensembles must start with 1 member; got sizes {sorted(deep_ensembles)}.")
    if not all(math.isfinite(x) for x in (log_likelihood, *deep_ensembles.values())):
        raise ValueError(f"Log-likelihoods must be finite; got {log_likelihood} and the curve {dict(curve)}.")
    if log_likelihood <= curve[0][1]:
        return 1.0
    for (l0, y0), (l1, y1) in pairwise(curve):
        if y1 >= log_likelihood:  # and y0 < log_likelihood, or an earlier pair had reached it
            return l0 + (l1 - l0) * (log_likelihood - y0) / (y1 - y0)
    return math.inf


def notes(
    runs: Sequence[RunResult], groups: Sequence[GroupResult], requested: int, baseline: str = DeepEnsembles.title
) -> list[str]:
    """Notes for readers of the results; `requested` is the number of test examples asked for."""
    messages = []
    fewest = min(run.clean.examples for run in runs)
    if fewest < requested:
        messages.append(f"{requested - fewest} of {requested} test examples cannot be read and are left out.")
    sets = [part for run in runs for part in (run.clean, *(s for by in run.corrupted.values() for s in by.values()))]
    at_bound = sum(part.temperature_at_bound for part in sets)
    if at_bound:
        messages.append(
            f"On {at_bound} of {len(sets)} test sets of all runs, a fitted temperature is at its bound, {BOUNDS[0]:g} "
            f"or {BOUNDS[1]:g}: half of the test set is predicted without error, or no better than chance. The "
            "calibrated NLL depends on the bound there; use the raw NLL. Where it happens on the clean test set, no "
            "deep-ensemble equivalent is given."
        )
    if len(groups) > 1 and not any(group.differences for group in groups):
        messages.append(f"No {baseline} share a seed with another group, so there are no differences.")
    return messages


def compare(
    group: ComparedGroup,
    groups: Sequence[ComparedGroup],
    endpoints: Sequence[str] = (),
    baseline_method: str = DeepEnsembles.title,
) -> GroupResult:
    """Compare one of several groups with those of the baseline method.

    The baseline is the group of that method that shares seeds with the group and differs from it in the fewest recipe
    fields; of several, the one of the same size. The p-values of the endpoints are corrected by Holm's method. The
    deep-ensemble equivalent is measured against the largest of the Deep Ensembles that differ least.
    """
    runs, method = group.runs, group.runs[0].method
    summaries = {run.seed: run.summary for run in runs}
    keys = [key for key in runs[0].summary if all(key in summary for summary in summaries.values())]
    metrics = {key: mean([summary[key] for summary in summaries.values()]) for key in keys}
    at_bound = any(run.temperature_at_bound() for run in runs)
    differing = {other.title: differing_fields(group.fields, other.fields) for other in groups}
    sizes = {other.title: other.runs[0].members for other in groups}

    def distance(other: ComparedGroup) -> tuple[int, int, bool, int]:
        shared = len(summaries.keys() & {run.seed for run in other.runs})
        return -min(shared, 1), len(differing[other.title]), sizes[other.title] != runs[0].members, -shared

    others = [other for other in groups if other.runs[0].method == baseline_method != method]
    baseline = min(others, key=distance, default=None)
    theirs = {run.seed: run.summary for run in baseline.runs} if baseline is not None else {}
    deep_ensembles = [other for other in groups if other.runs[0].method == DeepEnsembles.title]
    best = min(deep_ensembles, key=lambda other: (len(differing[other.title]), -sizes[other.title]), default=None)
    curve = {} if at_bound or best is None else _curve(best.runs)
    worth = deep_ensemble_equivalent(-metrics["nll"].mean, curve) if curve else None
    return GroupResult(
        title=group.title,
        method=method,
        members=runs[0].members,
        runs=[run.name for run in runs],
        seeds=list(summaries),
        metrics=metrics,
        baseline=None if baseline is None else baseline.title,
        baseline_differs_in=[] if baseline is None else differing[baseline.title],
        differences=paired_differences(summaries, theirs, endpoints) if theirs else {},
        deep_ensemble_equivalent=f"more than {max(curve)}" if worth == math.inf else worth,
        temperature_at_bound=at_bound,
        corrupted_temperature_at_bound=any(run.temperature_at_bound("corrupted_nll") for run in runs),
    )


def _curve(runs: Sequence[RunResult]) -> dict[int, float]:
    """Calibrated log-likelihood of Deep Ensembles by size, mean over runs; empty if a temperature is at its bound."""
    if any(run.temperature_at_bound() for run in runs):
        return {}
    return {int(n): -mean([run.details.by_size[n]["nll"] for run in runs]).mean for n in runs[0].details.by_size}
