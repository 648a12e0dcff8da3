"""The metric registry: every number of a summary is described by one entry."""

import re

import pytest
import torch
from helpers.random_predictions import random_predictions

from featureflock.evaluation.metrics.registry import METRICS, MINUS, Metric, find_metric, summarise
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions


def predictions(seed, members=3):
    log_p, labels = random_predictions(60, 4, seed, members=members)
    return SetPredictions(lambda: (log_p, labels))


@pytest.fixture
def run():
    return RunPredictions(
        predictions(0),
        views={"left": predictions(1), "right": predictions(2)},
        corrupted={"fog": {"1": predictions(3), "5": predictions(4)}, "snow": {"5": predictions(5)}},
        ood={"noise": predictions(6), "best_photos": predictions(7)},
        maps={"clean": torch.rand(3, 5, 4, 4)},
    )


def test_every_value_of_a_summary_has_a_metric(run):
    summary = summarise(run)
    for key, value in summary.items():
        metric = find_metric(key)
        assert metric.key == key
        assert "{}" not in metric.title + metric.meaning
        assert metric.compute(run) == value
    assert {"accuracy", "raw_corrupted_ece", "nll_at_severity_5", "auroc_best_photos", "left_share"} <= summary.keys()
    assert {"corrupted_map_similarity", "right_share"}.isdisjoint(summary)


def test_metrics_that_do_not_apply_are_left_out():
    summary = summarise(RunPredictions(predictions(0, members=1)))
    raw = ["raw_nll", "raw_brier", "raw_ece", "raw_aurc"]
    assert list(summary) == ["accuracy", "nll", "brier", "ece", "temperature", *raw, "aurc", "member_accuracy"]


def test_metrics_that_depend_on_the_temperature_name_their_uncalibrated_version(run):
    """Their value changes with the temperature; that of accuracy does not."""
    for key in ("nll", "brier", "ece", "aurc", "corrupted_nll", "corrupted_aurc", "nll_at_severity_5"):
        assert find_metric(key).uncalibrated in summarise(run), key
    assert find_metric("accuracy").uncalibrated == find_metric("corrupted_accuracy").uncalibrated == ""


def test_means_over_corrupted_sets_and_over_one_severity(run):
    nll = {(c, s): part.scores.calibrated["nll"] for c, sets in run.corrupted.items() for s, part in sets.items()}
    summary = summarise(run)
    assert summary["corrupted_nll"] == pytest.approx(sum(nll.values()) / 3)
    assert summary["nll_at_severity_1"] == pytest.approx(nll["fog", "1"])
    assert summary["nll_at_severity_5"] == pytest.approx((nll["fog", "5"] + nll["snow", "5"]) / 2)


def test_the_most_specific_family_is_found():
    """only_left_best_member_accuracy also matches only_{}_accuracy and only_{}_member_accuracy."""
    assert find_metric("only_left_best_member_accuracy").title == "best member, only left, %"
    assert find_metric("only_left_member_accuracy").title == "members, only left, %"
    assert find_metric("only_left_accuracy").title == "only left, %"


def test_unknown_metrics_are_refused_with_a_suggestion():
    with pytest.raises((KeyError, ValueError), match="accuracy"):
        find_metric("acuracy")


def test_uncalibrated_counterparts_exist():
    pairs = {metric.key: metric.uncalibrated for metric in METRICS.values() if metric.uncalibrated}
    assert pairs["nll"] == "raw_nll"
    assert pairs["corrupted_nll"] == "raw_corrupted_nll"
    for key, raw in pairs.items():
        assert METRICS[raw].better == METRICS[key].better


def test_keys_are_valid_and_formats_have_digits():
    for key, metric in METRICS.items():
        assert metric.key == key
        assert re.fullmatch(r"[a-z0-9_{}]+", key)
        assert re.fullmatch(r"(fixed|percent):\d", metric.format)
        assert ("{}" in key) == (metric.parts is not None)


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [(0.12345, False, "12.3"), (0.12345, True, "+12.3"), (-0.05, True, f"{MINUS}5.0"), (-0.0001, True, "0.0")],
)
def test_values_are_printed_with_their_digits(value, sign, text):
    metric = Metric("key", "Title, %", "higher", "percent:1", lambda run: None)
    assert metric.text(value, sign) == text


def test_values_of_user_defined_metrics_become_floats_and_must_be_finite(run, monkeypatch):
    monkeypatch.setitem(METRICS, "half", Metric("half", "Half", "", "fixed:1", lambda run: torch.tensor(0.5)))
    assert type(summarise(run)["half"]) is float
    monkeypatch.setitem(METRICS, "rank", Metric("rank", "Rank", "", "fixed:1", lambda run: float("nan")))
    with pytest.raises(ValueError, match="The metric rank is nan; return None where it does not apply"):
        summarise(run)


@pytest.mark.parametrize(
    ("key", "digits", "parts", "message"),
    [
        ("a", "percent", None, "the metric a has 'percent'"),
        ("a", "fixed:1", lambda run: ["x"], "The key of a metric with parts contains {}"),
    ],
)
def test_wrong_metrics_are_refused(key, digits, parts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Metric(key, "A", "", digits, lambda *_: 0.0, parts=parts)
