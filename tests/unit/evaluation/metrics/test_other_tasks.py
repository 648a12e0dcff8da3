"""Metrics of regression, multi-label and segmentation, against integrals, naive loops and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sk
from torch.testing import assert_close

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.evaluation.metrics.registry import METRICS
from featureflock.tasks import Classification, MultiLabel, Regression

RNG = np.random.default_rng(0)
N, B = 3, 60
MEANS, VARIANCES, Y = RNG.normal(size=(N, B)), RNG.uniform(0.2, 2, size=(N, B)), RNG.normal(size=B)


def distribution(z, b):
    return stats.norm(MEANS[:, b], np.sqrt(VARIANCES[:, b])).cdf(z).mean()


def test_regression_metrics_by_definition():
    assert ev.rmse(MEANS, Y) == pytest.approx(math.sqrt(sk.mean_squared_error(Y, MEANS.mean(0))))
    density = stats.norm(MEANS, np.sqrt(VARIANCES)).pdf(Y).mean(0)
    assert ev.mixture_nll(MEANS, VARIANCES, Y) == pytest.approx(-np.log(density).mean())
    pit = np.array([distribution(Y[b], b) for b in range(B)])
    for level in (0.5, 0.9):
        inside = np.mean([(1 - level) / 2 <= p <= (1 + level) / 2 for p in pit])
        assert ev.interval_coverage(MEANS, VARIANCES, Y, level) == pytest.approx(inside)
    gaps = [abs(np.mean(pit <= k / 20) - k / 20) for k in range(1, 20)]
    assert ev.regression_calibration_error(MEANS, VARIANCES, Y) == pytest.approx(np.mean(gaps))


def test_the_crps_is_the_integral_of_its_definition():
    values = []
    for b in range(6):
        below = integrate.quad(lambda z, b=b: distribution(z, b) ** 2, -12, Y[b], limit=200)[0]
        above = integrate.quad(lambda z, b=b: (1 - distribution(z, b)) ** 2, Y[b], 12, limit=200)[0]
        values.append(below + above)
    assert ev.crps(MEANS[:, :6], VARIANCES[:, :6], Y[:6]) == pytest.approx(np.mean(values), rel=1e-6)
    sharp = np.full((1, B), 1e-18)
    assert ev.crps(MEANS[:1], sharp, Y) == pytest.approx(np.abs(MEANS[0] - Y).mean(), rel=1e-6)


def test_calibrated_predictions_have_no_calibration_error():
    y = RNG.normal(2.0, 3.0, size=20_000)
    means, variances = np.full((1, len(y)), 2.0), np.full((1, len(y)), 9.0)
    assert ev.regression_calibration_error(means, variances, y) < 0.01
    assert ev.interval_coverage(means, variances, y) == pytest.approx(0.9, abs=0.01)
    assert ev.regression_calibration_error(means, variances / 9, y) > 0.1
    scores = ff.evaluate((means, variances / 4), y, task=Regression())
    assert scores["variance_scale"] == pytest.approx(4, rel=0.05)
    assert scores["coverage"] == pytest.approx(0.9, abs=0.01)
    assert scores["raw_coverage"] == pytest.approx(2 * stats.norm.cdf(stats.norm.ppf(0.95) / 2) - 1, abs=0.01)


def test_wrong_regression_arguments_are_refused():
    for args, message in (
        ((MEANS, VARIANCES[:2], Y), "must have shape"),
        ((MEANS, VARIANCES, Y[:, None]), "must have shape"),
        ((MEANS, -VARIANCES, Y), "variances must be positive"),
        ((MEANS, VARIANCES, Y * math.nan), "targets must be finite"),
        ((MEANS.tolist(), VARIANCES, Y), "means must be a tensor or array"),
    ):
        for metric in (ev.crps, ev.mixture_nll, ev.interval_coverage):
            with pytest.raises(ValueError, match=message):
                metric(*args)
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        ev.interval_coverage(MEANS, VARIANCES, Y, 90)


def test_multilabel_metrics_are_those_of_scikit_learn():
    p, y = RNG.uniform(size=(80, 5)), RNG.integers(2, size=(80, 5))
    s = ev.multilabel_scores(p, y)
    hard = p > 0.5
    assert s.label_accuracy == pytest.approx((hard == y).mean())
    assert s.exact_match == pytest.approx(sk.accuracy_score(y, hard))
    assert s.macro_f1 == pytest.approx(sk.f1_score(y, hard, average="macro"))
    assert s.mean_average_precision == pytest.approx(sk.average_precision_score(y, p, average="macro"))
    assert s.nll == pytest.approx(np.mean([sk.log_loss(y[:, k], p[:, k], labels=[0, 1]) for k in range(5)]))
    assert s.label_brier == pytest.approx(((p - y) ** 2).mean())
    place = np.minimum(np.ceil(15 * p.ravel()) - 1, 14)
    gaps = [abs((p.ravel() - y.ravel())[place == k].sum()) for k in range(15)]
    assert s.label_ece == pytest.approx(sum(gaps) / p.size)
    tied = p.round(1)
    found = ev.multilabel_scores(tied.clip(0.05, 0.95), y).mean_average_precision
    assert found == pytest.approx(sk.average_precision_score(y, tied.clip(0.05, 0.95), average="macro"))
    with pytest.raises(ValueError, match="one shape"):
        ev.multilabel_scores(p, y[:, 0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        ev.multilabel_scores(3 * p, y)


def test_segmentation_metrics_are_those_of_pixels():
    logits = torch.from_numpy(RNG.normal(size=(3, 4, 5, 6, 7)))
    probs, y = logits.softmax(2), torch.from_numpy(RNG.integers(5, size=(4, 6, 7)))
    scores = ff.evaluate(probs.numpy(), y.numpy())
    rows, labels = probs.mean(0).movedim(1, -1).reshape(-1, 5), y.flatten()
    predicted = rows.argmax(-1)
    assert scores["mean_iou"] == pytest.approx(sk.jaccard_score(labels, predicted, average="macro"))
    assert ev.mean_iou(probs.mean(0).numpy(), y.numpy()) == pytest.approx(scores["mean_iou"])
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(labels, predicted), abs=1e-6)
    assert scores["raw_nll"] == pytest.approx(sk.log_loss(labels, rows))
    unlabelled = y.clone()
    unlabelled[:2] = 255
    some = ff.evaluate(probs, unlabelled, task=Classification(ignore_index=255))
    assert some["raw_nll"] == pytest.approx(ff.evaluate(probs[:, 2:], y[2:])["raw_nll"])
    assert "mean_iou" not in ff.evaluate(probs[..., 0, 0], y[..., 0, 0])


def test_arrays_and_tensors_give_the_same_numbers():
    p, y = torch.rand(3, 50, 4).double().softmax(-1), torch.randint(4, (50,))
    assert ff.evaluate(p, y) == ff.evaluate(p.numpy(), y.numpy())
    for metric in (ev.accuracy, ev.nll, ev.brier, ev.ece, ev.aurc):
        assert metric(p[0].numpy(), y.numpy()) == metric(p[0], y)
    assert ev.scores(p[0].log().numpy(), y.numpy()) == ev.scores(p[0].log(), y)
    assert ev.member_diversity(p.numpy()) == ev.member_diversity(p)
    assert ev.fit_temperature(p[0].log().numpy(), y.numpy()) == ev.fit_temperature(p[0].log(), y)
    assert_close(ev.average(p.log().numpy()), ev.average(p.log()))
    assert ev.detection(np.arange(5.0), np.arange(3.0, 9.0)) == ev.detection(torch.arange(5.0), torch.arange(3.0, 9.0))


@pytest.mark.parametrize(
    ("predictions", "targets", "task", "message"),
    [
        (torch.rand(3, 9, 4), torch.zeros(9).long(), Classification(), "must sum to 1"),
        (torch.rand(3, 9, 4).softmax(-1), torch.zeros(9), Classification(), "integer class indices"),
        (torch.rand(9, 4).softmax(-1), torch.zeros(9).long(), Classification(), "members, examples, classes"),
        (torch.randn(3, 9, 4), torch.zeros(9, 4), MultiLabel(), "a probability from 0 to 1"),
        (torch.rand(3, 9, 4), torch.zeros(9).long(), MultiLabel(), "class indices belong to"),
        (torch.rand(3, 9), torch.zeros(9), Regression(), r"a pair \(means, variances\)"),
        ((torch.rand(3, 1), torch.rand(3, 1)), torch.zeros(1), Regression(), "at least two examples"),
    ],
)
def test_evaluate_refuses_what_does_not_belong_together(predictions, targets, task, message):
    with pytest.raises(ValueError, match=message):
        ff.evaluate(predictions, targets, task)


def test_each_metric_applies_to_its_tasks_only():
    classes = ff.evaluate(torch.rand(3, 20, 4).softmax(-1), torch.randint(4, (20,)))
    labels = ff.evaluate(torch.rand(3, 20, 4), torch.randint(2, (20, 4)), MultiLabel())
    numbers = ff.evaluate((MEANS, VARIANCES), Y, Regression())
    for kind, found in (("classification", classes), ("multi-label", labels), ("regression", numbers)):
        assert "nll" in found
        assert all(kind in METRICS[key].tasks for key in found)
    assert {"rmse", "crps", "coverage", "calibration_error", "raw_nll", "member_rmse", "epistemic_share"} <= {*numbers}
    assert not {"accuracy", "ece", "temperature"} & {*numbers}
    assert {"exact_match", "macro_f1", "mean_average_precision", "mutual_information"} <= {*labels}
    assert numbers["rmse"] == pytest.approx(ev.rmse(MEANS, Y))
    assert numbers["raw_crps"] == pytest.approx(ev.crps(MEANS, VARIANCES, Y))
