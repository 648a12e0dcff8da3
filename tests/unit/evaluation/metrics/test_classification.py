"""Metrics: against scikit-learn, plain loops and numbers worked out by hand; invariances; what is refused."""

import math
import random

import numpy as np
import pytest
import torch
from helpers.random_predictions import random_predictions, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torch.testing import assert_close

from featureflock import evaluation as ev
from featureflock.evaluation.metrics import classification as metrics
from featureflock.evaluation.metrics.classification import top_error

METRICS = (ev.accuracy, ev.brier, ev.ece, ev.aurc)


# ---- against others


@pytest.mark.parametrize("c", [2, 5, 30])
def test_agree_with_scikit_learn(c):
    log_p, y = random_predictions(c=c)
    p, classes = log_p.exp(), np.arange(c)
    assert ev.accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(1)), abs=1e-15)
    assert ev.nll(p, y) == pytest.approx(log_loss(y, p.numpy(), labels=classes), abs=1e-12)
    brier = brier_score_loss(y, p.numpy(), labels=classes, scale_by_half=False)
    assert ev.brier(p, y) == pytest.approx(brier, abs=1e-12)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_reliability_and_ece_are_those_of_a_plain_loop(bins):
    log_p, y = random_predictions(b=300)
    p = log_p.exp()
    r = ev.reliability(p, y, bins)
    error = 0.0
    for k in range(bins):
        inside = [(max(row), row.index(max(row)) == label) for row, label in zip(p.tolist(), y.tolist(), strict=True)]
        inside = [(top, hit) for top, hit in inside if k / bins < top <= (k + 1) / bins]
        assert r.count[k] == len(inside)
        if inside:
            confidence, hits = sum(t for t, _ in inside) / len(inside), sum(h for _, h in inside) / len(inside)
            assert r.confidence[k].item() == pytest.approx(confidence, abs=1e-12)
            assert r.accuracy[k].item() == pytest.approx(hits, abs=1e-12)
            error += len(inside) / 300 * abs(confidence - hits)
        else:
            assert r.confidence[k].isnan()
            assert r.accuracy[k].isnan()
    assert ev.ece(p, y, bins) == pytest.approx(error, abs=1e-12)


def test_risk_coverage_is_that_of_a_plain_loop():
    log_p, y = random_predictions()
    p = log_p.exp()
    order = sorted(range(len(y)), key=lambda b: -p[b].max().item())
    wrong = [float(p[b].argmax() != y[b]) for b in order]
    risk = [sum(wrong[:j]) / j for j in range(1, len(y) + 1)]
    curve = ev.risk_coverage(p, y)
    assert_close(curve.risk, torch.tensor(risk, dtype=torch.float64))
    assert_close(curve.coverage, torch.arange(1, 201, dtype=torch.float64) / 200)
    assert ev.aurc(p, y) == pytest.approx(sum(risk) / len(risk), abs=1e-12)


def test_average_is_the_log_of_the_mean_probability():
    log_p, _ = random_predictions(members=4)
    assert_close(ev.average(log_p), log_p.exp().mean(0).log())
    assert_close(ev.average(log_p[:1]), log_p[0])
    assert ev.average(log_p.float()).dtype == torch.float64


def test_slices_change_neither_the_average_nor_error_messages(monkeypatch):
    log_p, _ = random_predictions(members=4, b=11)
    expected = ev.average(log_p)
    monkeypatch.setattr(metrics, "SLICE", 4 * 5 * 3)
    assert torch.equal(ev.average(log_p), expected)
    log_p[2, 7] += 1
    with pytest.raises(ValueError, match=r"example 7 of member 2 sums to 2\.718"):
        ev.average(log_p)
    with pytest.raises(ValueError, match=r"member_log_probs must have shape \(members, examples, classes\)"):
        ev.average(log_p[0])


def test_scores_are_the_single_metrics():
    log_p, y = random_predictions()
    p = log_p.exp()
    assert ev.scores(log_p, y) == pytest.approx((ev.accuracy(p, y), ev.nll(p, y), *(m(p, y) for m in METRICS[1:])))
    assert ev.scores(log_p, y)._fields == ("accuracy", "nll", "brier", "ece", "aurc")


def test_members_have_their_own_accuracy():
    log_p, y = random_predictions(members=3)
    assert ev.member_accuracy(log_p.exp(), y) == pytest.approx([ev.accuracy(p, y) for p in log_p.exp()])


def test_mean_scores():
    a, b = metrics.Scores(1.0, 2.0, 3.0, 4.0, 5.0), metrics.Scores(0.0, 4.0, 1.0, 2.0, 1.0)
    assert metrics.mean_scores([a, b]) == (0.5, 3.0, 2.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="at least one test set"):
        metrics.mean_scores([])


# ---- by hand


def test_known_values():
    p, y = rows([0.5, 0.25, 0.25], [0.1, 0.8, 0.1]), torch.tensor([0, 2])
    assert ev.accuracy(p, y) == 0.5
    assert ev.nll(p, y) == pytest.approx((math.log(2) + math.log(10)) / 2)
    assert ev.brier(p, y) == pytest.approx(((0.25 + 0.0625 + 0.0625) + (0.01 + 0.64 + 0.81)) / 2)
    assert ev.ece(p, y) == pytest.approx((abs(0.5 - 1) + abs(0.8 - 0)) / 2)  # one in a bin
    assert ev.ece(p, y, bins=1) == pytest.approx(abs(0.65 - 0.5))
    assert ev.risk_coverage(p, y).risk.tolist() == [1.0, 0.5]
    assert ev.aurc(p, y) == 0.75


def test_bins_have_their_upper_edge_and_not_their_lower():
    tops = rows(6 / 15, np.nextafter(6 / 15, 1), 0.8, 1.0, 1.0)
    p = torch.stack([tops, (1 - tops) / 2, (1 - tops) / 2], dim=-1)
    assert ev.reliability(p, torch.zeros(5, dtype=torch.int64)).count.nonzero()[:, 0].tolist() == [5, 6, 11, 14]
    assert ev.reliability(p, torch.zeros(5, dtype=torch.int64)).count[[5, 6, 11, 14]].tolist() == [1, 1, 1, 2]
    # The least top probability that there is, 1/C, has a bin too.
    assert ev.reliability(torch.full((1, 15), 1 / 15), torch.tensor([0])).count.argmax() in (0, 1)
    assert ev.reliability(rows([1 / 15] * 15), torch.tensor([0])).count[0] == 1


def test_equal_confidence_counts_as_in_random_order():
    p, y = rows([0.9, 0.1], [0.7, 0.3], [0.7, 0.3], [0.7, 0.3]), torch.tensor([0, 1, 0, 0])
    risks = []
    rng = random.Random(0)
    for _ in range(4000):
        wrong = [0.0, *rng.sample([1.0, 0.0, 0.0], 3)]
        risks.append([sum(wrong[:j]) / j for j in range(1, 5)])
    assert_close(ev.risk_coverage(p, y).risk, torch.tensor(risks, dtype=torch.float64).mean(0), atol=0.02, rtol=0)
    assert ev.risk_coverage(p, y).risk.tolist() == pytest.approx([0, 1 / 6, 2 / 9, 1 / 4])


def test_confidence_is_ordered_where_it_rounds_to_one():
    p, y = torch.tensor([[1.0, 1e-12], [1.0, 1e-20], [1.0, 1e-9]]), torch.tensor([0, 0, 1])
    assert ev.risk_coverage(p, y).risk.tolist() == pytest.approx([0, 0, 1 / 3])
    assert_close(top_error(rows([0.7, 0.2, 0.1], [0.0, 0.0, 1.0])), rows(0.3, 0.0))


def test_perfect_and_worst_predictions():
    y = torch.arange(6) % 3
    perfect = torch.nn.functional.one_hot(y, 3).double()
    assert [m(perfect, y) for m in METRICS] == [1, 0, 0, 0]
    assert str(ev.nll(perfect, y)) == "0.0"
    worst = perfect.roll(1, -1)
    assert [m(worst, y) for m in METRICS] == [0, 2, 1, 1]
    assert ev.nll(worst, y) == math.inf


def test_uniform_predictions():
    y = torch.arange(8) % 4
    p = torch.full((8, 4), 0.25)
    assert ev.accuracy(p, y) == 0.25  # the first of equals
    assert ev.nll(p, y) == pytest.approx(math.log(4))
    assert ev.brier(p, y) == pytest.approx(0.75)
    assert ev.ece(p, y) == pytest.approx(0)
    assert ev.aurc(p, y) == pytest.approx(0.75)


def test_nll_is_finite_where_probabilities_underflow():
    log_p = torch.tensor([[0.0, 1000.0]]).log_softmax(-1)
    assert log_p.exp()[0, 0] == 0
    assert ev.scores(log_p, torch.tensor([0])).nll == pytest.approx(1000)


def test_probabilities_that_round_above_one():
    p, y = torch.tensor([[1.0000001, 0.0], [0.0, 1.0000001]]), torch.tensor([0, 1])
    assert (p.sum(-1) > 1).all()
    assert ev.reliability(p, y).count.tolist() == [0] * 14 + [2]
    assert ev.ece(p, y) == pytest.approx(0, abs=2e-7)
    assert ev.accuracy(p, y) == 1


def test_the_expected_calibration_error_of_calibrated_predictions_vanishes():
    g = torch.Generator().manual_seed(0)
    p = torch.randn(200_000, 3, generator=g, dtype=torch.float64).mul(2).softmax(-1)
    y = torch.multinomial(p, 1, generator=g)[:, 0]
    assert ev.ece(p, y) < 0.004
    assert ev.ece((3 * p.log()).softmax(-1), y) > 0.1


# ---- invariances


@settings(max_examples=25, deadline=None)
@given(b=st.integers(1, 40), c=st.integers(2, 7), seed=st.integers(0, 10**6), scale=st.floats(0.1, 30))
def test_the_order_of_examples_and_the_names_of_classes_do_not_matter(b, c, seed, scale):
    log_p, y = random_predictions(b, c, seed, scale)
    expected = ev.scores(log_p, y)
    g = torch.Generator().manual_seed(seed)
    order, names = torch.randperm(b, generator=g), torch.randperm(c, generator=g)
    assert ev.scores(log_p[order], y[order]) == pytest.approx(expected, abs=1e-12)
    renamed = torch.empty_like(log_p).index_copy_(1, names, log_p)
    assert ev.scores(renamed, names[y]) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(b=st.integers(1, 40), c=st.integers(2, 7), seed=st.integers(0, 10**6), scale=st.floats(0.1, 30))
def test_bounds_and_decompositions(b, c, seed, scale):
    log_p, y = random_predictions(b, c, seed, scale)
    s = ev.scores(log_p, y)
    assert 0 <= s.accuracy <= 1
    assert 0 <= s.brier <= 2
    assert 0 <= s.ece <= 1
    assert s.nll >= 0
    twice = ev.scores(log_p.repeat(2, 1), y.repeat(2))
    assert twice[:4] == pytest.approx(s[:4], abs=1e-12)
    # The mean top probability and the accuracy differ by at most the ECE.
    assert abs(log_p.exp().amax(-1).mean().item() - s.accuracy) <= s.ece + 1e-12
    # At full coverage all errors count.
    assert ev.risk_coverage(log_p.exp(), y).risk[-1].item() == pytest.approx(1 - s.accuracy, abs=1e-12)


def test_integers_of_any_width_and_half_precision():
    log_p, y = random_predictions()
    expected = ev.scores(log_p, y)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert ev.scores(log_p, y.to(dtype)) == expected
    assert ev.scores(log_p.float(), y) == pytest.approx(expected, abs=1e-6)
    assert ev.brier(log_p.exp().half(), y) == pytest.approx(expected.brier, abs=1e-3)


def test_arguments_are_unchanged_and_detached():
    log_p, y = random_predictions()
    copy = log_p.clone()
    ev.scores(log_p.requires_grad_(), y)
    assert torch.equal(log_p, copy)
    assert not ev.average(log_p[None]).requires_grad


# ---- what is refused


P, Y = rows([0.5, 0.5], [0.1, 0.9]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (P[None], Y, r"probs must have shape \(examples, classes\) without empty dimensions; got \(1, 2, 2\)"),
        (P[:0], Y[:0], r"without empty dimensions; got \(0, 2\)"),
        (P[:, :0], Y, r"without empty dimensions; got \(2, 0\)"),
        (P.long(), Y, "probs must be a tensor or array of floating-point numbers; got torch.int64"),
        (P.tolist(), Y, "probs must be a tensor or array of floating-point numbers; got list"),
        (rows([0.5, 0.5], [math.nan, 1]), Y, "probs must sum to 1 over the classes; example 1 sums to nan"),
        (rows([0.5, 0.5], [math.inf, 0]), Y, "example 1 sums to inf"),
        (rows([0.5, 0.5], [-0.5, 1.5]), Y, "probs must not be negative; the smallest is -0.5"),
        (rows([0.5, 0.5], [0.5, 0.6]), Y, "probs must sum to 1 over the classes; example 1 sums to 1.1"),
        (P, Y[:1], r"labels must have shape \(2,\), one for each example; got \(1,\)"),
        (P, Y[:, None], r"labels must have shape \(2,\), one for each example; got \(2, 1\)"),
        (P, Y.double(), "labels must be a tensor or array of integers; got torch.float64"),
        (P, Y == 1, "labels must be a tensor or array of integers; got torch.bool"),
        (P, [0, 1], "labels must be a tensor or array of integers; got list"),
        (P, torch.tensor([0, 2]), "labels must be from 0 to 1 for 2 classes; got 2"),
        (P, torch.tensor([0, -1]), "labels must be from 0 to 1 for 2 classes; got -1"),
    ],
)
@pytest.mark.parametrize("metric", [*METRICS, ev.nll, ev.reliability, ev.risk_coverage])
def test_bad_input_is_refused(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


def test_logits_are_refused_as_log_probabilities():
    with pytest.raises(ValueError, match=r"exp\(log_probs\) must sum to 1 over the classes; example 0 sums to 2"):
        ev.scores(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="example 0 of member 1 sums to 2"):
        ev.average(torch.tensor([[[0.5, 0.5]], [[1.0, 1.0]]]).log())
    with pytest.raises(ValueError, match="must sum to 1 over the classes; example 0 sums to nan"):
        ev.scores(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"member_probs must have shape \(members, examples, classes\)"):
        ev.member_accuracy(P, Y)
    for bins in (0, 2.5, 100_001, 10**9, 10**30):
        with pytest.raises(ValueError, match=f"bins must be an integer from 1 to 100,000; got {str(bins)[:20]}"):
            ev.ece(P, Y, bins=bins)
