"""One temperature from validation examples where cross-validation determines none; test sets of each seed."""

from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.data import Digits
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation.run_predictions import HeldOutCalibration
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import MLPConfig
from featureflock.training import Recipe, train

CLEAN = EvaluationProtocol(corruptions=(), ood=(), maps=0)
RECIPE = Recipe(Digits(), MLPConfig((32, 16)), members=2, epochs=15, subset=400, batch=32, learning_rate=0.03)


def test_the_temperature_is_that_of_the_held_out_examples():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (200,), generator=generator)
    signal = 2 * torch.nn.functional.one_hot(labels, 4)
    held_out, test = (
        (2 * torch.randn(3, 200, 4, generator=generator, dtype=torch.float64) + signal).log_softmax(-1)
        for _ in range(2)
    )
    calibration = HeldOutCalibration(held_out, labels)
    for members in ([0, 1, 2], [1], [2, 0]):
        mean = held_out[members].exp().mean(0).log()
        best = minimize_scalar(
            lambda t, mean=mean: cross_entropy(mean / t, labels).item(), bounds=(0.1, 50), options={"xatol": 1e-8}
        ).x
        scores, temperatures = calibration(test, labels, members)
        assert temperatures == pytest.approx((best,), rel=1e-4)
        expected = cross_entropy(test[members].exp().mean(0).log() / best, labels).item()
        assert scores.nll == pytest.approx(expected, rel=1e-6)
        assert scores.accuracy == (test[members].exp().mean(0).argmax(-1) == labels).double().mean().item()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    methods = (DeepEnsembles(), FeatureWGD(rank=2))
    for method in methods:
        train(replace(RECIPE, method=method, validation=300), folder / method.title)
    return [folder / method.title for method in methods]


def validation_temperature(folder) -> float:
    validation = replace(RECIPE, validation=300).splits().validation
    x = validation.x.float() / 16
    return ev.fit_temperature(ev.average(ff.load(folder / "ensemble").member_predictions(x)), validation.labels)


def test_ten_digits_without_an_error_are_calibrated_on_the_validation_examples(runs):
    """Cross-validation ends at its bound there. All test sets of a run then have the same temperature."""
    protocol = replace(CLEAN, examples=20, corruptions=("contrast",), severities=(1, 5))
    crossed = evaluate_runs(runs, replace(protocol, calibration="cross-validation")).results
    assert any(run.clean.temperature_at_bound for run in crossed.runs)
    results = evaluate_runs(runs, protocol).results
    for folder, run in zip(runs, results.runs, strict=True):
        expected = [pytest.approx(validation_temperature(folder), rel=1e-3)]
        assert run.clean.temperatures == expected
        assert run.corrupted["contrast"]["5"].temperatures == expected
        assert run.details.temperature == run.clean.temperatures[0]
        assert run.details.by_size["2"] == run.clean.calibrated
        assert not run.temperature_at_bound("corrupted_nll")
    assert "one temperature for all test sets, fitted on the 300 validation examples of each" in results.notes[-1]


def test_seeds_share_a_temperature(runs, tmp_path):
    """It is fitted on the validation examples of all runs together, of which each may be predicted without error."""
    recipe = replace(RECIPE, method=DeepEnsembles(), validation=300)
    train(replace(recipe, seed=1), tmp_path / "seed 1")
    folders = [runs[0], tmp_path / "seed 1"]
    results = evaluate_runs(folders, replace(CLEAN, calibration="held-out")).results
    validation = recipe.splits().validation
    predictions = [ff.load(f / "ensemble").member_predictions(validation.x.float() / 16) for f in folders]
    expected = ev.fit_temperature(torch.cat([ev.average(p) for p in predictions]), validation.labels.repeat(2))
    for run in results.runs:
        assert run.clean.temperatures == [pytest.approx(expected, rel=1e-3)]


def test_enough_errors_are_cross_validated(runs):
    protocol = replace(CLEAN, corruptions=("contrast",), severities=(5,))
    results = evaluate_runs(runs, protocol).results
    assert [len(run.clean.temperatures) for run in results.runs] == [10, 10]
    assert not any("one temperature" in note for note in results.notes)
    forced = evaluate_runs(runs, replace(protocol, calibration="held-out")).results
    assert [len(run.clean.temperatures) for run in forced.runs] == [1, 1]


def test_runs_without_validation_examples(tmp_path):
    train(replace(RECIPE, epochs=1), tmp_path / "run")
    with pytest.raises(ValueError, match="no validation examples to fit a temperature on; train it with --validation"):
        evaluate_runs([tmp_path / "run"], replace(CLEAN, calibration="held-out"))
    assert len(evaluate_runs([tmp_path / "run"], CLEAN).results.runs[0].clean.temperatures) == 10


def test_data_sets_that_provide_validation_examples_need_no_flag(tmp_path):
    recipe = replace(RECIPE, data=Digits(views=2))
    train(recipe, tmp_path / "run")
    assert "validation" not in (tmp_path / "run" / "metrics.jsonl").read_text()  # not evaluated in training
    (run,) = evaluate_runs([tmp_path / "run"], replace(CLEAN, calibration="held-out")).results.runs
    assert len(run.clean.temperatures) == 1
    assert run.summary["one_view_accuracy"] == pytest.approx(
        (run.summary["only_left_accuracy"] + run.summary["only_right_accuracy"]) / 2
    )
    nlls = [only.scores.calibrated["nll"] for only in run.views.only.values()]
    assert run.summary["one_view_nll"] == pytest.approx(sum(nlls) / 2)


def test_runs_whose_data_differ_in_their_seed_have_their_own_test_sets(tmp_path):
    folders = []
    for method in (DeepEnsembles(), FeatureWGD(rank=2)):
        for seed in range(2):
            data = Digits(views=2, seed=seed)
            recipe = replace(RECIPE, data=data, method=method, seed=seed, split_seed=seed, epochs=3, subset=None)
            folders.append(tmp_path / f"{method.title}-{seed}")
            train(recipe, folders[-1])
    protocol = replace(CLEAN, calibration="cross-validation")
    together = evaluate_runs(folders, protocol).results
    assert [(group.title, group.seeds) for group in together.groups] == [
        ("Deep Ensembles", [0, 1]),
        ("feature-WGD", [0, 1]),
    ]
    alone = [evaluate_runs([folder], protocol).results.runs[0] for folder in folders]
    assert [run.summary for run in together.runs] == [run.summary for run in alone]
    differences = [alone[2 + seed].summary["nll"] - alone[seed].summary["nll"] for seed in range(2)]
    assert together.groups[1].differences["nll"].mean == pytest.approx(sum(differences) / 2)
    assert together.disputed  # images of the first seed
    train(replace(RECIPE, epochs=1), tmp_path / "other")
    with pytest.raises(ValueError, match="different test sets"):
        evaluate_runs([*folders, tmp_path / "other"], protocol)
