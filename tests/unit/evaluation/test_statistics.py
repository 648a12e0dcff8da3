"""Means over seeds and paired differences: against SciPy, hand-worked numbers and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from featureflock.evaluation.statistics import mean, paired_difference


def test_mean_and_sample_deviation():
    values = [3.0, 5.0, 10.0]
    assert mean(values) == pytest.approx((6.0, math.sqrt((9 + 1 + 16) / 2), 3))
    assert mean(values).sd == pytest.approx(np.std(values, ddof=1))


def test_one_value_has_no_deviation_and_none_no_mean():
    assert mean([2.5]) == (2.5, None, 1)
    with pytest.raises(ValueError, match="at least one value"):
        mean([])


@pytest.mark.parametrize("m", [2, 3, 10])
def test_interval_is_that_of_the_paired_t_test(m):
    rng = np.random.default_rng(m)
    ours, theirs = rng.normal(0.3, 1, m), rng.normal(0, 1, m)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx((ours - theirs).mean())
    assert found.seeds == m


def test_only_shared_seeds_count_and_the_sign_is_ours_minus_theirs():
    found = paired_difference({0: 5.0, 1: 6.0, 7: 100.0}, {1: 4.0, 0: 4.0, 3: -50.0})
    # 1 and 2: mean 1.5, sd 0.7071, t(0.975, 1) = 12.706
    half = 12.7062047 * math.sqrt(0.5) / math.sqrt(2)
    assert found == pytest.approx((1.5, 1.5 - half, 1.5 + half, 2))


def test_what_seeds_share_cancels():
    theirs = {seed: 100.0 * seed for seed in range(4)}
    ours = {seed: value + 1 + 0.1 * (seed % 2) for seed, value in theirs.items()}
    # 1.0, 1.1, 1.0, 1.1: sd 0.057735, t(0.975, 3) = 3.18245
    half = 3.1824463 * 0.0577350 / 2
    assert paired_difference(ours, theirs) == pytest.approx((1.05, 1.05 - half, 1.05 + half, 4))


def test_one_shared_seed_has_no_interval_and_none_no_difference():
    assert paired_difference({0: 2.0}, {0: 1.5, 1: 0.0}) == (0.5, None, None, 1)
    assert paired_difference({0: 2.0}, {1: 1.0}) is None


def test_equal_differences_have_no_interval_and_are_not_significant():
    """Also where rounding makes them differ in the last digit: 0.3 − 0.2 ≠ 0.4 − 0.3 in floating point."""
    found = paired_difference({0: 0.3, 1: 0.4, 2: 0.9}, {0: 0.2, 1: 0.3, 2: 0.8})
    assert len({0.3 - 0.2, 0.4 - 0.3, 0.9 - 0.8}) > 1
    assert (found.mean, found.low, found.high) == (pytest.approx(0.1), None, None)
    assert found.significant is None
    noise = {0: 0.3 + 1.0e-8, 1: 0.3 + 1.1e-8, 2: 0.3 + 0.9e-8}  # below the precision of float32 predictions
    assert paired_difference(noise, dict.fromkeys(range(3), 0.3)).significant is None
    assert paired_difference({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.0, 1: 0.0, 2: 0.0}).significant is None
    assert paired_difference({0: 0.0, 1: 0.0, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0}).significant is None


@pytest.mark.parametrize(
    ("differences", "significant"),
    [((1.0, 1.001), None), ((1.0, 1.1, 1.2), True), ((-1.0, -1.1, -1.2), True), ((0.1, 1.0, 2.0), False)],
)
def test_significance_needs_three_seeds_and_an_interval_that_excludes_zero(differences, significant):
    """1.1 ± 4.303 · 0.1 / √3 = 1.1 ± 0.25 excludes 0; 1.03 ± 4.303 · 0.95 / √3 = 1.03 ± 2.36 does not."""
    found = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    assert found.significant is significant


@pytest.mark.parametrize(("resolution", "m"), [(0.0, 3), (0.0, 5), (0.5, 3), (2.0, 3), (2.0, 5)])
def test_intervals_cover_the_true_difference(resolution, m):
    """Also of a metric that takes few values, on a tiny test set; where there is no interval, nothing is claimed."""
    rng = np.random.default_rng(m)
    trials, missed, significant = 2_000, 0, 0
    for _ in range(trials):
        d = rng.normal(0, 1, m)
        if resolution:
            d = resolution * np.floor(d / resolution + rng.uniform(0, 1, m))  # unbiased: the mean stays 0
        found = paired_difference(dict(enumerate(d)), dict.fromkeys(range(m), 0.0))
        missed += found.low is not None and not found.low <= 0 <= found.high
        significant += bool(found.significant)
    assert significant == missed
    assert missed / trials < 0.065
    if not resolution:
        assert missed / trials > 0.035
