"""Diversity of predictions, OOD detection, and the deep-ensemble equivalent."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers.random_predictions import random_predictions, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch.testing import assert_close

import featureflock as ff
from featureflock import evaluation as ev

# ---- diversity


def test_disagreement_is_that_of_a_loop_over_pairs():
    p = random_predictions(members=5)[0].exp()
    classes = p.argmax(-1).tolist()
    pairs = [a != b for first, second in combinations(classes, 2) for a, b in zip(first, second, strict=True)]
    assert ev.disagreement(p) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_mutual_information_is_the_difference_of_entropies_and_the_mean_divergence():
    p = random_predictions(members=4)[0].exp()
    information = ev.mutual_information(p)
    difference = entropy(p.mean(0).numpy(), axis=-1) - entropy(p.numpy(), axis=-1).mean(0)
    assert_close(information, torch.from_numpy(difference))
    divergence = np.mean([entropy(member.numpy(), p.mean(0).numpy(), axis=-1) for member in p], axis=0)
    assert_close(information, torch.from_numpy(divergence))


def test_mutual_information_is_what_the_ensemble_calls_epistemic():
    torch.manual_seed(0)
    members = [torch.nn.Linear(3, 4).double() for _ in range(3)]
    ens, x = ff.Ensemble(members, [torch.nn.Identity() for _ in members]), torch.randn(7, 3).double()
    with torch.no_grad():
        assert_close(ev.mutual_information(ens(x).softmax(-1)), ens.uncertainty(x).epistemic)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 5), seed=st.integers(0, 10**6), scale=st.floats(0.1, 20))
def test_variance_is_the_gain_in_brier_score_by_averaging(n, seed, scale):
    log_p, y = random_predictions(b=30, seed=seed, scale=scale, members=n)
    p = log_p.exp()
    gain = sum(ev.brier(member, y) for member in p) / n - ev.brier(p.mean(0), y)
    assert ev.predictive_variance(p).mean().item() == pytest.approx(gain, abs=1e-12)


def test_two_members_certain_of_different_classes():
    p = rows([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert ev.disagreement(p) == 0.5
    assert_close(ev.mutual_information(p), rows(0.0, math.log(2)))
    assert_close(ev.predictive_variance(p), rows(0.0, 0.5))
    assert ev.member_diversity(p) == pytest.approx((0.5, math.log(2) / 2, 0.25))


def test_equal_members_and_one_member_have_no_diversity():
    p = random_predictions(members=1, scale=10.0)[0].exp()
    assert ev.member_diversity(p.expand(7, -1, -1)) == pytest.approx((0, 0, 0), abs=1e-14)
    assert (ev.mutual_information(p.expand(7, -1, -1)) >= 0).all()
    assert ev.mutual_information(p).max() < 1e-14
    assert ev.predictive_variance(p).max() == 0
    with pytest.raises(ValueError, match="there is only one"):
        ev.disagreement(p)


def test_the_order_of_members_does_not_matter():
    p = random_predictions(members=4)[0].exp()
    assert ev.member_diversity(p[[2, 0, 3, 1]]) == pytest.approx(ev.member_diversity(p), abs=1e-14)
    assert (ev.mutual_information(p) < math.log(4)).all()


# ---- OOD detection


def test_detection_agrees_with_scikit_learn():
    g = torch.Generator().manual_seed(0)
    for ties in (False, True):
        inside, outside = torch.randn(150, generator=g), torch.randn(90, generator=g) + 1
        if ties:
            inside, outside = inside.mul(2).round(), outside.mul(2).round()
        score, truth = torch.cat([inside, outside]).numpy(), np.repeat([0, 1], [150, 90])
        found = ev.detection(inside, outside)
        assert found.auroc == pytest.approx(roc_auc_score(truth, score), abs=1e-12)
        assert found.aupr == pytest.approx(average_precision_score(truth, score), abs=1e-12)
        fpr, tpr, _ = roc_curve(truth, score, drop_intermediate=False)
        assert found.fpr95 == pytest.approx(fpr[np.argmax(tpr >= 0.95)], abs=1e-12)


def test_detection_by_hand():
    found = ev.detection(uncertainty_in=rows(1.0, 2.0, 3.0), uncertainty_out=rows(2.0, 4.0))
    assert found.auroc == pytest.approx((1 + 0.5 + 0 + 3) / 6)
    assert found.aupr == pytest.approx(0.5 * 1 + 0.5 * (2 / 4))
    assert found.fpr95 == pytest.approx(2 / 3)
    assert ev.detection(rows(0.0, 1.0), rows(2.0, 3.0)) == (1, 1, 0)
    assert ev.detection(rows(2.0, 3.0), rows(0.0, 1.0)) == pytest.approx((0, 0.5 / 3 + 0.5 / 2, 1))
    assert ev.detection(torch.zeros(30), torch.zeros(10)) == (0.5, 0.25, 1)


def test_nineteen_of_twenty_are_95_percent():
    outside = torch.arange(1, 21).double()
    assert ev.detection(rows(1.5, 2.0, 2.5), outside).fpr95 == pytest.approx(2 / 3)  # the threshold is 2


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 40), m=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_only_the_order_of_scores_matters(n, m, seed):
    g = torch.Generator().manual_seed(seed)
    inside, outside = torch.randint(12, (n,), generator=g).double(), torch.randint(3, 15, (m,), generator=g).double()
    found = ev.detection(inside, outside)
    assert ev.detection(inside.exp(), outside.exp()) == found
    assert ev.detection(-outside, -inside).auroc == pytest.approx(found.auroc)
    assert ev.detection(outside, inside).auroc == pytest.approx(1 - found.auroc)
    wins = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    assert found.auroc == pytest.approx(wins.mean().item())


def test_out_of_distribution_by_each_uncertainty():
    inside, outside = (
        random_predictions(b=80, members=3, scale=4.0)[0].exp(),
        random_predictions(b=50, members=3, seed=1)[0].exp(),
    )
    found = ev.out_of_distribution(inside, outside)
    truth = np.repeat([0, 1], [80, 50])
    both = torch.cat([inside, outside], dim=1)
    uncertainties = entropy(both.mean(0).numpy(), axis=-1), ev.mutual_information(both), 1 - both.mean(0).amax(-1)
    for detection, u in zip(found, uncertainties, strict=True):
        assert detection.auroc == pytest.approx(roc_auc_score(truth, u), abs=1e-12)
    assert found._fields == ("entropy", "mutual_information", "top_probability")
    assert found.entropy.auroc > 0.6


def test_confidence_beyond_the_precision_of_one_is_still_ordered():
    inside = torch.tensor([[[1.0, 1e-20, 0.0], [1.0, 1e-21, 0.0]]])
    outside = torch.tensor([[[1.0, 1e-12, 0.0], [1.0, 1e-11, 0.0]]])
    found = ev.out_of_distribution(inside, outside)
    assert found.top_probability == (1, 1, 0)
    assert found.entropy == (1, 1, 0)


def test_bad_sets_are_refused():
    p = random_predictions(members=3)[0].exp()
    with pytest.raises(ValueError, match="Both sets must have the same numbers of members and classes"):
        ev.out_of_distribution(p, p[:2])
    with pytest.raises(ValueError, match="member_probs must have shape"):
        ev.out_of_distribution(p[0], p[0])
    for bad in (torch.zeros(0), torch.zeros(2, 2), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match=r"uncertainty_out must be a tensor of numbers \(B,\), not empty"):
            ev.detection(torch.zeros(3), bad)
    with pytest.raises(ValueError, match=r"uncertainty_in must be a tensor of numbers \(B,\)"):
        ev.detection([0.0, 0.0, 0.0], torch.zeros(3))


# ---- deep-ensemble equivalent

CURVE = {1: -0.30, 2: -0.25, 5: -0.22, 10: -0.20}


@pytest.mark.parametrize(
    ("log_likelihood", "equivalent"),
    [(-0.5, 1), (-0.30, 1), (-0.275, 1.5), (-0.25, 2), (-0.24, 3), (-0.22, 5), (-0.21, 7.5), (-0.20, 10)],
)
def test_equivalent_by_hand(log_likelihood, equivalent):
    assert ev.deep_ensemble_equivalent(log_likelihood, CURVE) == pytest.approx(equivalent)
    shuffled = {size: CURVE[size] for size in (5, 1, 10, 2)}
    assert ev.deep_ensemble_equivalent(log_likelihood, shuffled) == pytest.approx(equivalent)


@given(st.floats(-0.3, -0.2))
def test_equivalent_inverts_the_interpolated_curve(log_likelihood):
    size = ev.deep_ensemble_equivalent(log_likelihood, CURVE)
    assert np.interp(size, list(CURVE), list(CURVE.values())) == pytest.approx(log_likelihood, abs=1e-12)


def test_equivalent_beyond_the_curve_and_on_a_decreasing_one():
    assert ev.deep_ensemble_equivalent(-0.19, CURVE) == math.inf
    assert ev.deep_ensemble_equivalent(-0.25, {1: -0.3, 2: -0.2, 3: -0.28, 4: -0.1}) == pytest.approx(1.5)
    assert ev.deep_ensemble_equivalent(-0.15, {1: -0.3, 2: -0.2, 3: -0.28, 4: -0.1}) == pytest.approx(3 + 13 / 18)
    assert ev.deep_ensemble_equivalent(-0.3, {1: -0.3}) == 1


def test_equivalent_refuses_invalid_curves():
    for bad in ({}, {2: -0.3, 4: -0.2}, {0: -0.4, 1: -0.3}):
        with pytest.raises(ValueError, match="must start with 1 member; got sizes"):
            ev.deep_ensemble_equivalent(-0.2, bad)
    for value, curve in ((math.nan, CURVE), (-0.2, {1: -math.inf})):
        with pytest.raises(ValueError, match="Log-likelihoods must be finite"):
            ev.deep_ensemble_equivalent(value, curve)
