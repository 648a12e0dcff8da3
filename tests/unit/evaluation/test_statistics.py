"""Means over seeds and paired differences: against SciPy, and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from featureflock.evaluation import mean, paired_difference


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


def test_only_shared_seeds_count_and_the_sign_is_ours_less_theirs():
    found = paired_difference({0: 5.0, 1: 6.0, 7: 100.0}, {1: 4.0, 0: 4.0, 3: -50.0})
    # 1 and 2: mean 1.5, sd 0.7071, t(0.975, 1) = 12.706
    half = 12.7062047 * math.sqrt(0.5) / math.sqrt(2)
    assert found == pytest.approx((1.5, 1.5 - half, 1.5 + half, 2))


def test_what_seeds_have_in_common_falls_out():
    theirs = {seed: 100.0 * seed for seed in range(4)}
    found = paired_difference({seed: value + 1 for seed, value in theirs.items()}, theirs)
    assert found == pytest.approx((1, 1, 1, 4))


def test_one_shared_seed_has_no_interval_and_none_no_difference():
    assert paired_difference({0: 2.0}, {0: 1.5, 1: 0.0}) == (0.5, None, None, 1)
    assert paired_difference({0: 2.0}, {1: 1.0}) is None
