"""Means over seeds, and differences between methods that share their seeds.

    mean ± sd           x̄,  s = √(Σ (x_k − x̄)² / (m − 1))                        over m seeds
    paired difference   d_k = a_k − b_k for each seed k,    d̄ ± t_{0.975, m−1} · s_d / √m
    paired t-test       p = P(|T_{m−1}| ≥ |d̄| √m / s_d)
    Holm's method       p̃_(i) = max_{j ≤ i} min(1, (k − j + 1) p_(j))            of k p-values p_(1) ≤ … ≤ p_(k)

Runs of one seed start from the same initial weights and see the data in the same order, so the difference cancels what
they share. The interval is Student's, at 95 %, and needs at least two seeds.

There is no interval where all differences are equal, to rounding: noise may be below the resolution of the metric (an
accuracy on B examples is a multiple of 1/B), and an interval of width zero almost never covers the true mean. A
difference is called significant if its interval excludes 0 and there are at least 3 seeds: two differences agree in
sign by chance half of the time.

Of several endpoints that were declared beforehand, one would be significant by chance too often. Their p-values are
corrected by Holm's method, which bounds the probability of one or more false findings, and they are called significant
by the corrected value.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtr, stdtrit  # scipy.stats takes a second to import

LEVEL, SEEDS_FOR_SIGNIFICANCE = 0.95, 3
ROUNDING = 1e-6
"""Relative to the values: differences closer than this are equal, because predictions are in single precision."""


class SeedMean(NamedTuple):
    """Mean over seeds."""

    mean: float
    sd: float | None
    """Sample standard deviation; None for one seed."""
    seeds: int


class PairedDifference(NamedTuple):
    """Mean difference between two methods over the seeds that both have."""

    mean: float
    low: float | None
    high: float | None
    """95 % confidence interval; None for one seed, or if all differences are equal."""
    seeds: int
    p: float | None = None
    """p-value of the paired t-test, two-sided; None where there is no interval."""
    p_holm: float | None = None
    """The p-value corrected by Holm's method for all endpoints; None for a metric that is no endpoint."""

    @property
    def significant(self) -> bool | None:
        """Whether the interval excludes 0, or p_holm < 0.05; None if undecided: no interval, or fewer than 3 seeds."""
        if self.low is None or self.high is None or self.seeds < SEEDS_FOR_SIGNIFICANCE:
            return None
        return self.low > 0 or self.high < 0 if self.p_holm is None else self.p_holm < 1 - LEVEL


def mean(values: Sequence[float]) -> SeedMean:
    """Mean and sample standard deviation."""
    if not values:
        raise ValueError("A mean needs at least one value; got none.")
    m = len(values)
    centre = math.fsum(values) / m
    sd = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (m - 1)) if m > 1 else None
    return SeedMean(centre, sd, m)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> PairedDifference | None:
    """Ours minus theirs, both by seed, over the seeds they share; None if they share none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    centre, sd, m = mean([ours[seed] - theirs[seed] for seed in seeds])
    size = max(abs(value) for seed in seeds for value in (ours[seed], theirs[seed]))
    if sd is None or sd <= ROUNDING * size:
        return PairedDifference(centre, None, None, m)
    error = sd / math.sqrt(m)
    half = float(stdtrit(m - 1, (1 + LEVEL) / 2)) * error
    return PairedDifference(centre, centre - half, centre + half, m, 2 * float(stdtr(m - 1, -abs(centre) / error)))


def paired_differences(
    ours: Mapping[int, Mapping[str, float]],
    theirs: Mapping[int, Mapping[str, float]],
    endpoints: Sequence[str] = (),
) -> dict[str, PairedDifference]:
    """The paired difference of every metric that all runs have; both arguments by seed, then by metric.

    The p-values of the endpoints are corrected for one another. An endpoint without a p-value counts as one that is not
    significant.
    """
    summaries, differences = [*ours.values(), *theirs.values()], {}
    for key in [key for key in summaries[0] if all(key in summary for summary in summaries)]:
        pair = ({seed: summary[key] for seed, summary in each.items()} for each in (ours, theirs))
        if (difference := paired_difference(*pair)) is not None:
            differences[key] = difference
    return corrected(differences, endpoints)


def corrected(differences: Mapping[str, PairedDifference], endpoints: Sequence[str]) -> dict[str, PairedDifference]:
    """The differences by metric, with the p-values of the endpoints corrected for one another."""
    differences = dict(differences)
    p_values = [1.0 if (d := differences.get(key)) is None or d.p is None else d.p for key in endpoints]
    for key, corrected in zip(endpoints, holm(p_values), strict=True):
        if key in differences and differences[key].p is not None:
            differences[key] = differences[key]._replace(p_holm=corrected)
    return differences


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected by Holm's method (1979), in the order given.

    Rejecting those below α bounds the probability of one or more false rejections by α, for any dependence.
    """
    if not all(0 <= p <= 1 for p in p_values):  # also false for NaN
        raise ValueError(f"p-values must be from 0 to 1; got {list(p_values)}.")
    corrected, largest, k = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, index in enumerate(sorted(range(k), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (k - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
