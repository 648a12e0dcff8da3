"""Predictions of any origin: arrays, several test sets, methods and seeds; what cannot be right is refused."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.evaluation import evaluate_predictions
from featureflock.tasks import Classification, MultiLabel, Regression

B, C = 300, 4
Y = np.random.default_rng(0).integers(C, size=B)


def logits(seed, skill=1.5, n=3, examples=B):
    z = np.random.default_rng(seed).normal(size=(n, examples, C))
    if examples == B:
        z[:, np.arange(B), Y] += skill
    return z


def probs(*args, **kwargs):
    p = np.exp(logits(*args, **kwargs))
    return p / p.sum(-1, keepdims=True)


def methods(seeds=(0, 1, 2), **more):
    """Predictions by method and seed, and `more` test sets of each."""
    return {
        title: {seed: {"probs": probs(10 * k + seed, 1.5 + 0.3 * k), **more} for seed in seeds}
        for k, title in enumerate(("Deep Ensembles", "mine"))
    }


def test_scores_of_one_ensemble_are_those_of_the_metrics():
    p = probs(0)
    scores = ff.evaluate(p, Y)
    mean = p.mean(0)
    assert scores["raw_nll"] == pytest.approx(log_loss(Y, mean, labels=range(C)))
    assert scores["accuracy"] == pytest.approx((mean.argmax(-1) == Y).mean())
    expected = ev.calibrated(torch.from_numpy(np.log(mean)), torch.from_numpy(Y)).scores
    assert [scores[key] for key in ("nll", "brier", "ece")] == pytest.approx(
        [expected.nll, expected.brier, expected.ece]
    )


def test_corrupted_and_ood_sets_are_more_arrays():
    fog, snow, other = probs(1, 1.0), probs(2, 0.5), probs(3, examples=120)
    nested = {"probs": probs(0), "corrupted": {"fog": {3: fog}, "snow": {10: snow}}, "ood": {"other": other}}
    flat = {"probs": probs(0), "corrupted/fog/3": fog, "corrupted/snow/10": snow, "ood/other": other}
    scores = ff.evaluate(nested, Y)
    assert scores == ff.evaluate(flat, Y)
    each = [ff.evaluate(p, Y) for p in (fog, snow)]
    assert scores["corrupted_nll"] == pytest.approx(np.mean([s["nll"] for s in each]))
    assert [key for key in scores if key.startswith("nll_at")] == ["nll_at_severity_3", "nll_at_severity_10"]
    assert scores["nll_at_severity_3"] == pytest.approx(each[0]["nll"])
    assert scores["accuracy_at_severity_10"] == pytest.approx(each[1]["accuracy"])
    entropy = [-(p.mean(0) * np.log(p.mean(0))).sum(-1) for p in (probs(0), other)]
    expected = roc_auc_score(np.repeat([0, 1], [B, 120]), np.concatenate(entropy))
    assert scores["auroc_other"] == pytest.approx(expected)
    assert scores["nll"] == ff.evaluate(probs(0), Y)["nll"]


class ArrayOfAnotherLibrary:
    """What JAX, TensorFlow and pandas offer NumPy."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_arrays_of_any_origin_give_the_same_scores():
    p, expected = probs(0), ff.evaluate(probs(0), Y)
    read_only = p.copy()
    read_only.flags.writeable = False
    for array in (torch.from_numpy(p), read_only, p.astype(">f8"), np.asfortranarray(p), ArrayOfAnotherLibrary(p)):
        assert ff.evaluate(array, Y) == expected
    for labels in (torch.from_numpy(Y), Y.astype(np.uint16), Y.astype(">i4"), ArrayOfAnotherLibrary(Y)):
        assert ff.evaluate(p, labels) == expected
    leaf = torch.from_numpy(p).requires_grad_()
    assert ff.evaluate(leaf, Y) == expected
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = ff.evaluate(torch.from_numpy(p).to(dtype), Y)
        assert rounded["raw_nll"] == pytest.approx(expected["raw_nll"], rel=1e-2)


def test_logits_and_log_probabilities():
    expected = ff.evaluate(probs(0), Y)
    for array in (logits(0), np.log(probs(0))):
        assert ff.evaluate(array, Y, logits=True) == pytest.approx(expected)
        assert ff.evaluate({"logits": array}, Y) == pytest.approx(expected)
    y = (np.random.default_rng(1).random((B, C)) < 0.5).astype(int)
    labels = ff.evaluate(logits(0), y, MultiLabel(), logits=True)
    assert labels == pytest.approx(ff.evaluate(1 / (1 + np.exp(-logits(0))), y, MultiLabel()))


def test_probabilities_that_underflow_have_a_finite_nll_and_a_note():
    p = probs(0)
    p[:, :2] = np.eye(C)[(Y[:2] + 1) % C]
    results = evaluate_predictions(p, Y)
    assert math.isfinite(results.runs[0].summary["raw_nll"])
    assert any("2 of 300 labels have the probability 0" in note for note in results.notes)


def test_methods_and_seeds_are_compared_with_paired_intervals():
    results = ff.evaluate(methods(), Y)
    ours, theirs = (
        np.array([ff.evaluate(run, Y)["nll"] for run in seeds.values()])
        for seeds in (methods()["mine"], methods()["Deep Ensembles"])
    )
    base, mine = results.groups
    assert mine.metrics["nll"] == pytest.approx((ours.mean(), ours.std(ddof=1), 3))
    low, high = stats.t.interval(0.95, 2, (ours - theirs).mean(), stats.sem(ours - theirs))
    found = mine.differences["nll"]
    assert (found.mean, found.low, found.high) == pytest.approx(((ours - theirs).mean(), low, high))
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert (mine.baseline, base.differences, mine.seeds) == ("Deep Ensembles", {}, [0, 1, 2])
    assert mine.deep_ensemble_equivalent == "more than 3"


def test_any_method_can_be_the_baseline():
    renamed = {"ours": methods()["mine"], "theirs": methods()["Deep Ensembles"]}
    results = ff.evaluate(renamed, Y)
    assert all(not group.differences for group in results.groups)
    assert any("choose one of the methods as the baseline" in note for note in results.notes)
    results = ff.evaluate(renamed, Y, baseline="theirs")
    assert results.groups[0].differences == ff.evaluate(methods(), Y).groups[1].differences
    assert [group.deep_ensemble_equivalent for group in results.groups] == [None, None]
    with pytest.raises(ValueError, match="no method 'their'; did you mean theirs"):
        ff.evaluate(renamed, Y, baseline="their")


def test_names_of_registered_methods_have_their_titles():
    results = ff.evaluate({"feature-wgd": {0: probs(0)}, "deep-ensembles": {0: probs(1)}}, Y)
    assert [group.title for group in results.groups] == ["feature-WGD", "Deep Ensembles"]
    assert results.groups[0].baseline == "Deep Ensembles"


def test_methods_without_seeds_have_one():
    results = ff.evaluate({"a": probs(0), "Deep Ensembles": {"probs": probs(1, n=5)}}, Y)
    assert [group.seeds for group in results.groups] == [[0], [0]]
    assert [group.members for group in results.groups] == [3, 5]
    assert results.groups[0].differences["nll"].low is None


def test_held_out_examples_calibrate_where_cross_validation_cannot():
    """With so skilful members half of the test set has no error, which determines no temperature."""
    sure = {"probs": probs(0, 7.0)}
    held_out = {"validation": probs(5, 1.0), "validation_labels": Y}
    without, auto = evaluate_predictions(sure, Y), evaluate_predictions(sure | held_out, Y)
    assert without.runs[0].clean.temperature_at_bound
    expected = ev.fit_temperature(np.log(probs(5, 1.0).mean(0)), Y)
    assert auto.runs[0].clean.temperatures == pytest.approx([expected])
    assert any("fitted on the 300 validation examples" in note for note in auto.notes)
    assert ff.evaluate(sure | held_out, Y) == auto.runs[0].summary
    assert ff.evaluate(sure, Y) == without.runs[0].summary
    usual = {"probs": probs(0)} | held_out
    assert len(evaluate_predictions(usual, Y).runs[0].clean.temperatures) == 10
    assert evaluate_predictions(usual, Y, calibration="held-out").runs[0].clean.temperatures == pytest.approx(
        [expected]
    )
    other = usual | {"validation": probs(6, 0.5)}
    both = evaluate_predictions({"a": {0: usual, 1: other}}, Y, calibration="held-out")
    joint = np.log(np.concatenate([probs(5, 1.0), probs(6, 0.5)], 1).mean(0))
    expected = ev.fit_temperature(joint, np.concatenate([Y, Y]))
    assert [run.clean.temperatures for run in both.runs] == [pytest.approx([expected])] * 2
    with pytest.raises(ValueError, match="seed 0 has no arrays validation"):
        evaluate_predictions({"a": {0: probs(0)}}, Y, calibration="held-out")


def test_regression_and_multi_label_methods():
    rng = np.random.default_rng(0)
    targets, y = rng.normal(size=B), rng.integers(2, size=(B, C))
    pairs = {seed: (targets + rng.normal(size=(3, B)), np.full((3, B), 1.2)) for seed in range(2)}
    named = {seed: {"means": means, "variances": variances} for seed, (means, variances) in pairs.items()}
    results = ff.evaluate({"mine": pairs}, targets, Regression())
    assert results.task == "regression"
    assert results.groups == ff.evaluate({"mine": named}, targets, Regression()).groups
    assert results.groups[0].metrics["rmse"].mean == pytest.approx(
        np.mean([ff.evaluate(pair, targets, Regression())["rmse"] for pair in pairs.values()])
    )
    labels = {seed: rng.random((3, B, C)) for seed in range(2)}
    assert ff.evaluate({"mine": labels}, y, MultiLabel()).classes == C


def test_segmentation_methods():
    p = np.random.default_rng(0).dirichlet(np.ones(C), size=(3, 6, 5, 5)).transpose(0, 1, 4, 2, 3)
    y = np.random.default_rng(1).integers(C, size=(6, 5, 5))
    results = ff.evaluate({"mine": {0: p}}, y)
    assert results.dense
    assert results.groups[0].metrics["mean_iou"].mean == ff.evaluate(p, y)["mean_iou"]
    with pytest.raises(ValueError, match="one class per example"):
        ff.evaluate({"probs": p, "corrupted/fog/1": p}, y)


def test_results_can_be_stored_and_read():
    more = {"corrupted/fog/2": probs(7), "ood/other": probs(8, examples=50)}
    results = ff.evaluate(methods(**more), Y)
    assert [(s.name, s.kind, s.examples) for s in results.test_sets] == [
        ("clean", "clean", B),
        ("fog-2", "corrupted", B),
        ("other", "ood", 50),
    ]
    assert ev.EvaluationResults.from_json(json.loads(json.dumps(results.to_json(), allow_nan=False))) == results


BAD = {
    "a list": (probs(0).tolist(), Y, "got list; stack lists of members with np.stack"),
    "one network": (probs(0)[0], Y, r"got \(300, 4\). A single network is an ensemble of one: array\[None\]"),
    "integers": (np.ones((3, B, C), int), Y, "floating-point numbers; got torch.int64"),
    "objects": (probs(0).astype(object), Y, "got an array of object"),
    "empty": (probs(0)[:0], Y, "without empty dimensions"),
    "logits": (logits(0), Y, "has a negative one. If these are logits, pass logits=True"),
    "positive logits": (np.abs(logits(0)), Y, "sums to .* If these are logits, pass logits=True"),
    "named logits": ({"probs": logits(0)}, Y, 'name them "logits" instead of "probs"'),
    "NaN": (np.where(np.arange(B)[:, None] == 7, np.nan, probs(0)), Y, "example 7 of member 0"),
    "infinite": ({"logits": logits(0) + np.inf}, Y, "NaN or infinite"),
    "fewer labels": (probs(0), Y[:-1], r"\(3, 300, 4\) and targets \(299,\)"),
    "examples first": (probs(0).swapaxes(0, 1), Y, "labels: "),
    "a label too large": (probs(0), np.where(Y == 3, 4, Y), "must be 0 to 3 for 4 outputs; got 4"),
    "a negative label": (probs(0), Y - 1, "got -1"),
    "floating-point labels": (probs(0), Y.astype(float), "integer class indices"),
    "labels as a list": (probs(0), Y.tolist(), "labels: must be a tensor or array of numbers"),
    "labels as text": (probs(0), Y.astype(str), "an array of <U21"),
    "no predictions": ({"corrupted/fog/3": probs(0)}, Y, "either probs or logits; got corrupted/fog/3"),
    "both": ({"probs": probs(0), "logits": logits(0)}, Y, "either probs or logits"),
    "no severity": ({"probs": probs(0), "corrupted/fog": probs(0)}, Y, "'corrupted/fog' is not the name of a test set"),
    "severity 0": ({"probs": probs(0), "corrupted": {"fog": {0: probs(0)}}}, Y, "corrupted/fog/0"),
    "labels within": ({"probs": probs(0), "labels": Y}, Y, "'labels' is not the name of a test set"),
    "other corrupted examples": (
        {"probs": probs(0), "corrupted/fog/3": probs(0)[:, :9]},
        Y,
        "corrupted/fog/3: a corrupted test set has the examples of the clean one.*got 9 and 300",
    ),
    "other members": ({"probs": probs(0), "ood/x": probs(0)[:2]}, Y, "ood/x: all test sets need the same members"),
    "other classes": ({"probs": probs(0), "ood/x": np.full((3, 9, 2), 0.5)}, Y, "same members and classes"),
    "half of validation": ({"probs": probs(0), "validation": probs(0)}, Y, "belong together"),
    "one example": (probs(0)[:, :1], Y[:1], "at least two examples"),
    "no methods": ({}, Y, "no predictions to evaluate"),
    "no seeds": ({"a": {}}, Y, "a: give its predictions by seed"),
    "seeds as text": ({"a": {"0": probs(0)}}, Y, "with integers; got '0'"),
    "a list of seeds": ({"a": [probs(0), probs(1)]}, Y, "give seeds as a dictionary"),
    "no name": ({"": {0: probs(0)}}, Y, "Methods must have names"),
    "twice": ({"deep-ensembles": {0: probs(0)}, "Deep Ensembles": {0: probs(0)}}, Y, "Two methods are called"),
    "other test sets": (
        {"a": {0: {"probs": probs(0), "ood/x": probs(1)}, 1: probs(1)}},
        Y,
        "a, seed 1 has no ood/x, which a, seed 0 has",
    ),
    "seeds of other sizes": ({"a": {0: probs(0), 1: probs(1, n=4)}}, Y, "a, seed 1 has 4 members and a, seed 0 has 3"),
    "a bad seed": ({"a": {0: probs(0), 5: logits(0)}}, Y, "^a, seed 5: probabilities"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_right_is_refused(case):
    predictions, labels, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        ff.evaluate(predictions, labels)


def test_probabilities_are_not_taken_for_logits():
    with pytest.raises(ValueError, match="these are probabilities, not logits"):
        ff.evaluate(probs(0), Y, logits=True)
    with pytest.raises(ValueError, match=r"in a dictionary, name them \"logits\""):
        ff.evaluate({"probs": probs(0)}, Y, logits=True)


def test_tasks_have_their_own_arrays():
    with pytest.raises(ValueError, match="needs arrays named means and variances; got probs"):
        ff.evaluate({"probs": probs(0)}, Y, Regression())
    with pytest.raises(ValueError, match="a, seed 0: Regression needs predictions as a pair"):
        ff.evaluate({"a": {0: probs(0)}}, Y, Regression())
    with pytest.raises(ValueError, match="baseline is for several methods"):
        ff.evaluate(probs(0), Y, Classification(), baseline="a")
    with pytest.raises(ValueError, match="class_names must be 4 strings"):
        evaluate_predictions(probs(0), Y, class_names=["a", "b"])
