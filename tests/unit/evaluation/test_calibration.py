"""Temperature: closed forms, scipy and a grid; its bounds; cross-validation against a plain loop."""

import math

import numpy as np
import pytest
import torch
from helpers.random_predictions import random_predictions, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch.testing import assert_close

from featureflock import evaluation as ev
from featureflock.evaluation import calibration
from featureflock.evaluation.metrics.classification import mean_scores


def nll_at(log_p, y, temperature):
    return ev.scores((log_p / temperature).log_softmax(-1), y).nll


def by_scipy(log_p, y):
    found = minimize_scalar(
        lambda u: nll_at(log_p, y, math.exp(u)),
        bounds=(math.log(0.01), math.log(100)),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return math.exp(found.x)


# ---- one temperature


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("c", [2, 5, 40])
def test_is_the_minimum_that_scipy_and_a_grid_find(scale, c):
    log_p, y = random_predictions(c=c, scale=scale)
    t = ev.fit_temperature(log_p, y)
    assert t == pytest.approx(by_scipy(log_p, y), rel=1e-6)
    assert all(nll_at(log_p, y, t) <= nll_at(log_p, y, s) for s in np.geomspace(0.01, 100, 200))
    assert nll_at(log_p, y, t) < min(nll_at(log_p, y, 1.001 * t), nll_at(log_p, y, t / 1.001))


def test_closed_form_for_one_confidence():
    # All predictions are σ(2), 7 of 10 are right: σ(2β) = 0.7.
    log_p = torch.tensor([[2.0, 0.0]], dtype=torch.float64).log_softmax(-1).repeat(10, 1)
    y = torch.tensor([0] * 7 + [1] * 3)
    assert ev.fit_temperature(log_p, y) == pytest.approx(2 / math.log(0.7 / 0.3), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(k=st.floats(0.2, 5), seed=st.integers(0, 10**6), c=st.integers(2, 6))
def test_logits_times_k_have_a_temperature_times_k(k, seed, c):
    log_p, y = random_predictions(c=c, seed=seed)
    t = ev.fit_temperature(log_p, y)
    assert ev.fit_temperature((k * log_p).log_softmax(-1), y) == pytest.approx(k * t, rel=1e-8)


def test_recovers_the_scale_of_calibrated_logits():
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(100_000, 4, generator=g, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    assert ev.fit_temperature((3.5 * logits).log_softmax(-1), y) == pytest.approx(3.5, rel=0.02)


def test_tempered_is_the_normalised_power_of_the_average():
    members, y = random_predictions(members=3)
    log_p = ev.average(members)
    p = log_p.exp() ** (1 / 1.7)
    assert_close(ev.tempered(log_p, 1.7).exp(), p / p.sum(-1, keepdim=True))
    assert_close(ev.tempered(log_p, 1.0), log_p)
    # After averaging, not before.
    before = ev.average((members / 1.7).log_softmax(-1))
    assert (ev.tempered(log_p, 1.7) - before).abs().max() > 0.1
    assert ev.tempered(log_p.float(), 2).dtype == torch.float64
    assert ev.accuracy(ev.tempered(log_p, 5).exp(), y) == ev.accuracy(log_p.exp(), y)


def test_derivatives_are_those_of_autograd():
    log_p, y = random_predictions(b=31)
    half = torch.zeros(31, 2, dtype=torch.float64)
    half[:20, 0] = half[20:, 1] = 1
    beta = rows(0.6, 1.9).requires_grad_()
    loss = -((half @ beta)[:, None] * log_p).log_softmax(-1).gather(-1, y[:, None]).sum()
    (slope,) = torch.autograd.grad(loss, beta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), beta)  # the halves do not interact
    found = calibration._Likelihood(log_p, y).derivatives(beta.detach(), half)
    assert_close(found, torch.stack([slope.detach(), curvature]))


# ---- at the edges


def test_at_the_bounds():
    log_p, _ = random_predictions(scale=3.0)
    assert ev.fit_temperature(log_p, log_p.argmax(-1)) == 0.01
    assert ev.fit_temperature(log_p, log_p.argmin(-1)) == 100
    # Also where the gain underflows, and where little of it is left.
    sure = torch.tensor([[0.0, -2000.0]] * 4)
    assert ev.fit_temperature(sure, torch.zeros(4, dtype=torch.int64)) == 0.01
    assert ev.fit_temperature(sure, torch.ones(4, dtype=torch.int64)) == 100
    # Newton's steps alone would creep there, by 1/5 in β each.
    near = torch.tensor([[0.0, -5.0]] * 4).log_softmax(-1)
    assert ev.fit_temperature(near, torch.zeros(4, dtype=torch.int64)) == 0.01
    # A minimum beyond the bounds is at the bounds.
    log_p, y = random_predictions()
    t = ev.fit_temperature(log_p, y)
    assert ev.fit_temperature((150 / t * log_p).log_softmax(-1), y) == 100
    assert ev.fit_temperature((0.005 / t * log_p).log_softmax(-1), y) == 0.01
    assert ev.fit_temperature((99 / t * log_p).log_softmax(-1), y) == pytest.approx(99, rel=1e-6)
    assert ev.fit_temperature((0.0101 / t * log_p).log_softmax(-1), y) == pytest.approx(0.0101, rel=1e-6)


def test_uniform_predictions_keep_temperature_one():
    y = torch.arange(10) % 4
    log_p = torch.full((10, 4), 0.25, dtype=torch.float64).log()
    assert ev.fit_temperature(log_p, y) == 1
    assert ev.calibrated(log_p, y).temperatures == (1,) * 10
    assert ev.calibrated(log_p, y).scores.nll == pytest.approx(math.log(4))
    assert ev.fit_temperature(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)) == 1


def test_a_constant_prediction_is_calibrated_to_the_class_frequencies_it_can_reach():
    log_p = rows([0.9, 0.1]).log().repeat(5, 1)
    t = ev.fit_temperature(log_p, torch.tensor([0, 0, 0, 1, 1]))
    assert ev.tempered(log_p, t).exp()[0].tolist() == pytest.approx([0.6, 0.4], abs=1e-9)


def test_zero_probabilities():
    p, y = rows([0.6, 0.4, 0.0], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.1, 0.7, 0.2]), torch.tensor([1, 0, 1, 1])
    tiny = p.clamp_min(1e-300).log()  # as good as zero from T = 0.01 to 20 or so
    t = ev.fit_temperature(p.log(), y)
    assert t == pytest.approx(ev.fit_temperature(tiny, y), rel=1e-6)
    assert all(math.isfinite(x) for x in ev.calibrated(p.log(), y).scores)
    with pytest.raises(ValueError, match="The label of example 2 has probability 0, so the NLL is infinite"):
        ev.fit_temperature(p.log(), torch.tensor([1, 0, 2, 1]))


@settings(max_examples=60, deadline=None)
@given(
    b=st.integers(1, 30),
    c=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    power=st.floats(-8, 4),
    spread=st.floats(0, 4),
    right=st.floats(0, 1),
)
def test_no_other_temperature_is_better(b, c, seed, power, spread, right):
    g = torch.Generator().manual_seed(seed)
    scale_b1 = 10 ** (power + spread * torch.randn(b, 1, generator=g, dtype=torch.float64))
    log_p = (scale_b1.clamp_max(1e6) * torch.randn(b, c, generator=g, dtype=torch.float64)).log_softmax(-1)
    y = torch.where(torch.rand(b, generator=g) < right, log_p.argmax(-1), torch.randint(c, (b,), generator=g))
    t = ev.fit_temperature(log_p, y)
    assert 0.01 <= t <= 100
    grid = torch.from_numpy(np.geomspace(0.01, 100, 400))[:, None, None]
    best = -(log_p / grid).log_softmax(-1)[:, torch.arange(b), y].mean(-1).max().item()
    assert nll_at(log_p, y, t) <= best * (1 + 1e-12) + 1e-13


# ---- cross-validation


@pytest.mark.parametrize(("b", "seed"), [(60, 0), (61, 3)])
def test_cross_validation_is_that_of_a_plain_loop(b, seed):
    log_p, y = random_predictions(b=b, scale=4.0)
    generator = torch.Generator().manual_seed(seed)
    parts, temperatures = [], []
    for _ in range(5):
        order = torch.randperm(b, generator=generator).tolist()
        first, second = order[: b // 2], order[b // 2 :]
        for fit, score in ((first, second), (second, first)):
            temperatures.append(by_scipy(log_p[fit], y[fit]))
            parts.append(ev.scores((log_p[score] / temperatures[-1]).log_softmax(-1), y[score]))
    found = ev.calibrated(log_p, y, seed=seed)
    assert found.temperatures == pytest.approx(temperatures, rel=1e-6)
    assert found.scores == pytest.approx(tuple(np.mean(parts, axis=0)), abs=1e-7)


def test_each_half_has_the_temperature_fitted_to_it_alone():
    for b, scale in ((8, 3.0), (9, 0.3), (300, 20.0)):
        log_p, y = random_predictions(b=b, scale=scale, seed=b)
        if b == 8:
            y = log_p.argmax(-1)
            y[0] = log_p[0].argmin()
        alone = [ev.fit_temperature(log_p[h], y[h]) for pair in calibration.halves(b, 5, 0) for h in pair]
        assert ev.calibrated(log_p, y).temperatures == pytest.approx(alone, rel=1e-8)


@pytest.mark.parametrize(("b", "c", "scale"), [(60, 2, 0.2), (61, 10, 3.0), (200, 5, 30.0)])
def test_scores_are_those_of_the_halves_at_the_temperatures_given(b, c, scale):
    log_p, y = random_predictions(b=b, c=c, scale=scale)
    found = ev.calibrated(log_p, y)
    swapped = [half for pair in calibration.halves(b, 5, 0) for half in reversed(pair)]
    parts = [ev.scores(ev.tempered(log_p, t)[h], y[h]) for t, h in zip(found.temperatures, swapped, strict=True)]
    assert found.scores == pytest.approx(mean_scores(parts), abs=1e-13)


def test_temperature_does_not_change_the_accuracy_even_with_ties():
    """Two members that are each sure of another class: rounding must not choose between them."""
    log_p, y = random_predictions(members=2, scale=40.0, b=400)
    p = ev.average(torch.stack([log_p[0], log_p[0].roll(1, -1)]))
    assert (p.topk(2).values.diff() == 0).any()
    assert ev.calibrated(p, y).scores.accuracy == pytest.approx(ev.scores(p, y).accuracy, abs=1e-13)


def test_halves_are_disjoint_and_complete():
    for count in (2, 7, 10):
        for first, second in calibration.halves(count, 5, seed=1):
            assert len(first) == count // 2
            assert sorted([*first.tolist(), *second.tolist()]) == list(range(count))
    assert len({tuple(first.tolist()) for first, _ in calibration.halves(40, 5, seed=1)}) == 5


def test_only_the_seed_is_random():
    log_p, y = random_predictions()
    state = torch.get_rng_state()
    assert ev.calibrated(log_p, y) == ev.calibrated(log_p, y, seed=0, shuffles=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert ev.calibrated(log_p, y, seed=1).scores.nll != ev.calibrated(log_p, y).scores.nll
    assert len(ev.calibrated(log_p, y, shuffles=2).temperatures) == 4


def test_does_not_depend_on_the_temperature_it_is_given():
    log_p, y = random_predictions(scale=3.0)
    expected = ev.calibrated(log_p, y)
    found = ev.calibrated((log_p / 4).log_softmax(-1), y)
    assert found.scores == pytest.approx(expected.scores, abs=1e-8)
    assert [4 * t for t in found.temperatures] == pytest.approx(expected.temperatures, rel=1e-8)


def test_calibration_helps_the_overconfident():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=g, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    log_p = (4 * logits).log_softmax(-1)
    raw, cv = ev.scores(log_p, y), ev.calibrated(log_p, y).scores
    assert cv.nll < raw.nll - 0.5
    assert cv.ece < raw.ece / 5
    assert cv.brier < raw.brier
    assert cv.accuracy == pytest.approx(raw.accuracy, abs=1e-12)  # halves of one size
    # In expectation it is the NLL at the best temperature, or a little worse.
    best = nll_at(log_p, y, ev.fit_temperature(log_p, y))
    assert best < cv.nll < best + 0.003


def test_a_half_may_be_all_correct_or_all_uniform():
    log_p, y = random_predictions(b=8, scale=3.0)
    y = log_p.argmax(-1)
    y[0] = log_p[0].argmin()
    found = ev.calibrated(log_p, y)
    assert min(found.temperatures) == 0.01
    assert all(math.isfinite(x) for x in found.scores)
    log_p = torch.cat([torch.full((5, 5), 0.2, dtype=torch.float64).log(), log_p[:1]])
    assert 1 in ev.calibrated(log_p, y[:6].clamp_max(4)).temperatures
    assert len(ev.calibrated(log_p[:2], y[:2]).temperatures) == 10


def test_slices_do_not_change_the_result(monkeypatch):
    log_p, y = random_predictions(b=101)
    expected = ev.calibrated(log_p, y)
    monkeypatch.setattr(calibration, "SLICE", 40)
    found = ev.calibrated(log_p, y)
    assert found.temperatures == pytest.approx(expected.temperatures, rel=1e-10)
    assert found.scores == pytest.approx(expected.scores, abs=1e-10)


def test_few_evaluations_are_enough(monkeypatch):
    counts = []
    plain = calibration._Likelihood.derivatives
    monkeypatch.setattr(calibration._Likelihood, "derivatives", lambda self, *a: counts.append(1) or plain(self, *a))
    for scale in (0.5, 2.0, 8.0):
        log_p, y = random_predictions(b=4000, c=10, scale=scale)
        counts.clear()
        ev.calibrated(log_p, y)
        assert len(counts) <= 25, scale  # 11 fits


# ---- what is refused


def test_bad_input_is_refused():
    log_p, y = random_predictions(b=4)
    for bad in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="A temperature must be a positive, finite number"):
            ev.tempered(log_p, bad)
    with pytest.raises(ValueError, match="needs at least two examples and one shuffle; got 1 and 5"):
        ev.calibrated(log_p[:1], y[:1])
    with pytest.raises(ValueError, match="needs at least two examples and one shuffle; got 4 and 0"):
        ev.calibrated(log_p, y, shuffles=0)
    with pytest.raises(ValueError, match="shuffles must be at most 1,000; got 1000000000"):
        ev.calibrated(log_p, y, shuffles=10**9)
    for function in (ev.fit_temperature, ev.calibrated):
        with pytest.raises(ValueError, match=r"exp\(log_probs\) must sum to 1"):
            function(3 * log_p, y)
        with pytest.raises(ValueError, match="labels must be from 0 to 4"):
            function(log_p, y + 5)
