"""Means over seeds and paired differences: against SciPy, hand-worked numbers and simulation."""

import importlib.util
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from featureflock.evaluation.statistics import holm, mean, paired_difference, paired_differences


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
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert (found.p < 0.05) == (not found.low <= 0 <= found.high)


def test_only_shared_seeds_count_and_the_sign_is_ours_minus_theirs():
    found = paired_difference({0: 5.0, 1: 6.0, 7: 100.0}, {1: 4.0, 0: 4.0, 3: -50.0})
    # 1 and 2: mean 1.5, sd 0.7071, t(0.975, 1) = 12.706
    half = 12.7062047 * math.sqrt(0.5) / math.sqrt(2)
    assert found[:4] == pytest.approx((1.5, 1.5 - half, 1.5 + half, 2))
    assert found.p == pytest.approx(1 - 2 * math.atan(1.5 / 0.5) / math.pi)  # Student's t with one degree: Cauchy


def test_what_seeds_share_cancels():
    theirs = {seed: 100.0 * seed for seed in range(4)}
    ours = {seed: value + 1 + 0.1 * (seed % 2) for seed, value in theirs.items()}
    # 1.0, 1.1, 1.0, 1.1: sd 0.057735, t(0.975, 3) = 3.18245
    half = 3.1824463 * 0.0577350 / 2
    assert paired_difference(ours, theirs)[:4] == pytest.approx((1.05, 1.05 - half, 1.05 + half, 4))


def test_one_shared_seed_has_no_interval_and_none_no_difference():
    assert paired_difference({0: 2.0}, {0: 1.5, 1: 0.0}) == (0.5, None, None, 1, None, None)
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


# ---- Holm's correction


def test_holm_by_hand():
    """0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, which must not be smaller than the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.5]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def closed_testing(p_values):
    """Holm's method is the closed test of Bonferroni's: the largest |S| · min p of all sets S that contain i."""
    k = len(p_values)
    sets = [s for size in range(1, k + 1) for s in itertools.combinations(range(k), size)]
    return [max(min(1, len(s) * min(p_values[j] for j in s)) for s in sets if i in s) for i in range(k)]


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_holm_is_the_closed_test(k):
    rng = np.random.default_rng(k)
    for _ in range(20):
        p_values = (rng.uniform(0, 1, k) ** 3).round(2).tolist()  # with ties
        assert holm(p_values) == pytest.approx(closed_testing(p_values))


@pytest.mark.skipif(importlib.util.find_spec("statsmodels") is None, reason="statsmodels is not installed")
def test_holm_is_that_of_statsmodels():
    from statsmodels.stats.multitest import multipletests

    p_values = np.random.default_rng(0).uniform(0, 1, 12) ** 2
    assert holm(p_values.tolist()) == pytest.approx(multipletests(p_values, method="holm")[1])


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan])
def test_p_values_are_probabilities(wrong):
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        holm([0.5, wrong])


def by_seed(**columns):
    return {seed: {key: values[seed] for key, values in columns.items()} for seed in range(4)}


def test_only_endpoints_are_corrected_and_for_one_another():
    rng = np.random.default_rng(0)
    ours = by_seed(a=rng.normal(1, 0.4, 4), b=rng.normal(1, 0.4, 4), c=rng.normal(0, 1, 4), equal=[1.0] * 4)
    zeros = by_seed(a=[0.0] * 4, b=[0.0] * 4, c=[0.0] * 4, equal=[0.0] * 4)
    found = paired_differences(ours, zeros, ("a", "c", "equal"))
    p_values = {key: difference.p for key, difference in found.items()}
    assert p_values["equal"] is None
    expected = holm([p_values["a"], p_values["c"], 1.0])[:2]  # an endpoint without a test still counts
    assert [found["a"].p_holm, found["c"].p_holm] == expected
    assert expected[0] == pytest.approx(3 * p_values["a"])
    assert (found["b"].p_holm, found["equal"].p_holm) == (None, None)
    assert all(difference.p_holm is None for difference in paired_differences(ours, zeros).values())


def test_endpoints_are_significant_by_the_corrected_value():
    """Differences 1, 2, 3: t = 2 √3 = 3.46, p = 0.074 of two degrees; 1, 1.5, 2: t = 5.2, p = 0.035."""
    ours = {seed: {"a": 1 + 0.5 * seed, "b": float(seed - 1)} for seed in range(3)}
    zeros = {seed: {"a": 0.0, "b": 0.0} for seed in range(3)}
    assert paired_differences(ours, zeros)["a"].significant
    corrected = paired_differences(ours, zeros, ("a", "b"))["a"]
    assert (corrected.p, corrected.p_holm) == pytest.approx((0.0351, 0.0702), abs=1e-4)
    assert corrected.significant is False
    assert paired_differences(ours, zeros, ("a",))["a"].significant


def test_with_holms_method_false_findings_are_rare():
    """Eight endpoints without any difference: at least one is significant in at most 5 % of the studies."""
    rng, trials, any_raw, any_corrected = np.random.default_rng(0), 400, 0, 0
    keys = [f"m{i}" for i in range(8)]
    zeros = {seed: dict.fromkeys(keys, 0.0) for seed in range(5)}
    for _ in range(trials):
        ours = {seed: dict(zip(keys, rng.normal(0, 1, 8).tolist(), strict=True)) for seed in range(5)}
        any_raw += any(d.significant for d in paired_differences(ours, zeros).values())
        any_corrected += any(d.significant for d in paired_differences(ours, zeros, keys).values())
    assert any_raw / trials > 0.25
    assert any_corrected / trials < 0.08
