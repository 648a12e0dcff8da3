"""Means over seeds, and differences between methods that share their seeds.

    mean ± sd           x̄,  s = √(Σ (x_k − x̄)² / (m − 1))                        over m seeds
    paired difference   d_k = a_k − b_k for each seed k,    d̄ ± t_{0.975, m−1} · s_d / √m

Runs of one seed start from the same initial weights and see the data in the same order, so what they have in common
falls out of the difference. The interval is Student's, at 95 %; it needs at least two seeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtrit  # scipy.stats takes a second to import

LEVEL = 0.95


class SeedMean(NamedTuple):
    """Over seeds."""

    mean: float
    sd: float | None
    """None for one seed."""
    seeds: int


class PairedDifference(NamedTuple):
    """Of a method from another, over the seeds that both have."""

    mean: float
    low: float | None
    high: float | None
    """The 95 % confidence interval; None for one seed."""
    seeds: int


def mean(values: Sequence[float]) -> SeedMean:
    """Mean and sample standard deviation."""
    if not values:
        raise ValueError("A mean needs at least one value; got none.")
    m = len(values)
    centre = math.fsum(values) / m
    sd = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (m - 1)) if m > 1 else None
    return SeedMean(centre, sd, m)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> PairedDifference | None:
    """Ours less theirs, both by seed, over the seeds they share; None if they share none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    centre, sd, m = mean([ours[seed] - theirs[seed] for seed in seeds])
    if sd is None:
        return PairedDifference(centre, None, None, m)
    half = float(stdtrit(m - 1, (1 + LEVEL) / 2)) * sd / math.sqrt(m)
    return PairedDifference(centre, centre - half, centre + half, m)


def paired_differences(
    ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]
) -> dict[str, dict[str, float | int | None]]:
    """The same for every number that all runs have; both by seed, then by the number's name."""
    summaries = [*ours.values(), *theirs.values()]
    keys = [key for key in summaries[0] if all(key in summary for summary in summaries)]
    found = {
        key: paired_difference({s: v[key] for s, v in ours.items()}, {s: v[key] for s, v in theirs.items()})
        for key in keys
    }
    return {key: difference._asdict() for key, difference in found.items() if difference is not None}
