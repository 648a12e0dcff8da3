"""scikit-learn's own checks, and what the estimators promise beyond them."""

import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import featureflock as ff
from featureflock.integrations import FlockClassifier, FlockRegressor
from featureflock.integrations.tensor_training import calibration_on_few, held_out_rows
from featureflock.methods import ADP, DICE, METHODS, DeepEnsembles, FeatureWGD, Single
from featureflock.models import MLP
from featureflock.training.validation import DivergenceError

SMALL = {"members": 2, "module": partial(MLP, widths=(16,)), "learning_rate": 0.02, "batch": 32}
classifier = partial(FlockClassifier, **SMALL, epochs=10, random_state=0)
regressor = partial(FlockRegressor, **SMALL, epochs=40, random_state=0)
IRIS, DIABETES = load_iris(return_X_y=True), load_diabetes(return_X_y=True)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([classifier(), regressor()])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_estimators_learn():
    assert classifier().fit(*IRIS).score(*IRIS) > 0.93
    assert regressor().fit(*DIABETES).score(*DIABETES) > 0.45


@pytest.mark.parametrize("method", [make() for name, make in METHODS.items() if name != "single"])
def test_every_method_trains(method):
    model = classifier(method, epochs=15).fit(*IRIS)
    assert model.score(*IRIS) > 0.85
    assert len(model.ensemble_) == 2


def test_the_default_is_feature_wgd_and_a_method_has_its_own_size():
    model = FlockClassifier(epochs=1, random_state=0).fit(*IRIS)
    assert isinstance(model.ensemble_.layer, ff.ParticleLayer)
    assert len(model.ensemble_) == 10
    assert len(FlockClassifier(Single(), epochs=1).fit(*IRIS).ensemble_) == 1


def test_predictions_are_those_of_the_ensemble():
    model = classifier().fit(*IRIS)
    x = torch.from_numpy((IRIS[0] - model.scaler_.mean_) / model.scaler_.scale_)
    np.testing.assert_allclose(model.predict_proba(IRIS[0]), model.ensemble_.predict(x), rtol=1e-10)
    np.testing.assert_allclose(model.predict_uncertainty(IRIS[0]).total, model.ensemble_.uncertainty(x).total)
    probs = model.predict_proba(IRIS[0])
    np.testing.assert_array_equal(model.predict(IRIS[0]), probs.argmax(1))
    np.testing.assert_allclose(model.predict_log_proba(IRIS[0]), np.log(probs), atol=1e-12)


def test_the_regressor_predicts_in_the_unit_of_the_targets():
    X, y = DIABETES
    model = regressor().fit(X, y)
    moved = regressor().fit(X, 1e9 + 1000 * y)  # float32 has a resolution of 64 here
    np.testing.assert_allclose((moved.predict(X) - 1e9) / 1000, model.predict(X), rtol=1e-3)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, model.predict(X))
    np.testing.assert_allclose(std**2, model.predict_uncertainty(X).total)
    np.testing.assert_allclose(moved.predict(X, return_std=True)[1], 1000 * std, rtol=1e-3)
    assert np.sqrt(np.mean((y - mean) ** 2)) == pytest.approx(std.mean(), rel=0.3)


def test_the_noise_is_learnt_without_held_out_data():
    X, y = DIABETES
    model = regressor(DeepEnsembles(), validation_fraction=0).fit(X, y)
    residual = np.mean((y - model.predict(X)) ** 2)
    assert residual < 0.6 * y.var()
    assert model.predict_uncertainty(X).aleatoric.mean() == pytest.approx(residual, rel=0.3)


def test_several_targets():
    X, y = DIABETES
    both = np.stack([y, -2 * y + 5], 1)
    model = regressor().fit(X, both)
    assert model.predict(X).shape == (len(y), 2)
    assert model.score(X, both) > 0.4
    assert model.predict_uncertainty(X).epistemic.shape == (len(y), 2)


@pytest.mark.parametrize(("make", "data"), [(classifier, IRIS), (regressor, DIABETES)])
def test_uncertainty_adds_up(make, data):
    total, aleatoric, epistemic = make().fit(*data).predict_uncertainty(data[0])
    assert total.shape == (len(data[1]),)
    np.testing.assert_allclose(total, aleatoric + epistemic, rtol=1e-9)
    assert (epistemic > 0).all()
    assert (aleatoric > 0).all()


def test_far_inputs_are_more_uncertain():
    model = regressor(DeepEnsembles(), members=5).fit(*DIABETES)
    near, far = (model.predict_uncertainty(k * DIABETES[0]).epistemic.mean() for k in (1, 10))
    assert far > 5 * near


@pytest.mark.parametrize("method", [FeatureWGD(), DICE()])
def test_the_same_seed_gives_the_same_bits_and_global_state_is_unchanged(method):
    def fitted(seed):
        return classifier(method, epochs=3).set_params(random_state=seed).fit(*IRIS).predict_proba(IRIS[0])

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = fitted(0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, fitted(0))
    assert np.abs(first - fitted(1)).max() > 1e-3


def test_early_stopping_uses_the_weights_of_the_best_epoch():
    X, y = IRIS
    noisy = np.random.default_rng(0).permutation(y)  # nothing to learn, so that training only overfits
    stopped = classifier(epochs=200, patience=3, validation_fraction=0.3).fit(X, noisy)
    curve = stopped.validation_nll_
    assert stopped.n_iter_ == len(curve) == len(stopped.loss_curve_) == int(np.argmin(curve)) + 1 + 3 < 200
    same = classifier(epochs=int(np.argmin(curve)) + 1, patience=None, validation_fraction=0.3).fit(X, noisy)
    np.testing.assert_array_equal(stopped.predict_proba(X), same.predict_proba(X))
    assert classifier(epochs=12, patience=None, validation_fraction=0.3).fit(X, noisy).n_iter_ == 12


def test_without_held_out_data_there_is_no_calibration():
    model = classifier(validation_fraction=0).fit(*IRIS)
    assert model.validation_nll_ == []
    assert model.ensemble_.temperature == 1
    assert model.n_iter_ == 10


def test_calibration_minimises_the_penalised_nll_on_the_held_out_rows():
    X, y = IRIS
    rng = np.random.default_rng(0)
    noisy = np.where(rng.random(len(y)) < 0.3, rng.integers(3, size=len(y)), y)
    model = classifier(epochs=60, patience=None, validation_fraction=0.3).fit(X, noisy)
    seed = int(np.random.RandomState(0).randint(4_000_000))
    rows = held_out_rows(torch.from_numpy(noisy), 0.3, seed)
    temperature = float(model.ensemble_.temperature)
    log_p = temperature * model.predict_log_proba(X[rows])  # up to a constant for each row

    def objective(t):
        probs = np.exp(log_p / t)
        return len(rows) * log_loss(noisy[rows], probs / probs.sum(1, keepdims=True)) + np.log(t) ** 2 / 2

    assert objective(temperature) < min(objective(temperature * 1.02), objective(temperature / 1.02))
    assert temperature != 1


def test_a_few_correct_predictions_hardly_change_the_temperature():
    log_p = torch.tensor([[0.95, 0.05]] * 10).log()[None]
    few = calibration_on_few(ff.tasks.Classification(), log_p, torch.zeros(10, dtype=torch.int64))
    assert 0.5 < few < 1
    # 900 of 1,000 correct at 95 %: the temperature at which the confidence is 90 %, log(19) / log(9)
    y = (torch.arange(1000) % 10 == 0).long()
    many = calibration_on_few(ff.tasks.Classification(), log_p.expand(1, 10, 2).repeat(1, 100, 1), y)
    assert many == pytest.approx(np.log(19) / np.log(9), rel=0.01)


def test_variance_scale_is_the_mean_squared_residual_in_units_of_the_variance():
    residual = torch.linspace(-3, 3, 501)
    members = torch.stack([torch.zeros(501, 1), torch.zeros(501, 1)], 1)[None]  # mean 0, log-variance 0
    scale = calibration_on_few(ff.tasks.Regression(variance=1.0), members, residual)
    assert scale == pytest.approx(float(residual.square().mean()), rel=0.01)


def test_held_out_rows_have_the_shares_of_the_classes():
    strata = torch.tensor([0] * 60 + [1] * 30 + [2] * 10 + [3])[torch.randperm(101)]
    rows = held_out_rows(strata, 0.2, seed=0)
    assert len(rows) == len(set(rows.tolist())) == 20
    counts = torch.bincount(strata[rows], minlength=4).tolist()
    assert [abs(a - b) <= 1 for a, b in zip(counts, [12, 6, 2, 0], strict=True)] == [True] * 4
    assert counts[3] == 0  # the only example of its class is trained on
    assert len(held_out_rows(torch.arange(5), 0.9, seed=0)) == 0
    assert not torch.equal(rows, held_out_rows(strata, 0.2, seed=1))


def test_strings_and_data_frames():
    frame = pd.DataFrame(IRIS[0], columns=["a", "b", "c", "d"])
    names = np.array(["setosa", "versicolor", "virginica"])[IRIS[1]]
    model = classifier().fit(frame, pd.Series(names))
    assert list(model.feature_names_in_) == ["a", "b", "c", "d"]
    assert model.score(frame, names) > 0.9
    np.testing.assert_array_equal(model.predict_proba(frame), classifier().fit(*IRIS).predict_proba(IRIS[0]))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c", "d"]])


def test_pickle_and_clone():
    model = classifier(DeepEnsembles()).fit(*IRIS)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(model)).predict_proba(IRIS[0]), model.predict_proba(IRIS[0])
    )
    copy = clone(model)
    assert copy.get_params()["method"] == DeepEnsembles()
    assert not hasattr(copy, "ensemble_")


def test_grid_search_pipeline_and_calibration():
    grid = {"flockclassifier__method": [FeatureWGD(repulsion=2.0), DeepEnsembles()]}
    pipeline = make_pipeline(MinMaxScaler(), classifier(epochs=5))
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss", error_score="raise").fit(*IRIS)
    assert search.best_params_["flockclassifier__method"] in grid["flockclassifier__method"]
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    calibrated = CalibratedClassifierCV(classifier(epochs=40), cv=2).fit(*IRIS)
    assert calibrated.score(*IRIS) > 0.9


def batch_norm_extractor(inputs):
    return nn.Sequential(nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1))


def test_a_module_of_the_user():
    model = classifier(module=batch_norm_extractor, batch=67, epochs=40).fit(*IRIS)  # 135 rows: the last batch has one
    assert model.score(*IRIS) > 0.9
    assert isinstance(model.ensemble_.extractors[0][1], nn.BatchNorm1d)
    assert model.ensemble_.head.in_features == 12
    again = classifier(module=batch_norm_extractor, batch=67, epochs=40).fit(*IRIS)
    np.testing.assert_array_equal(again.predict_proba(IRIS[0]), model.predict_proba(IRIS[0]))


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"method": FeatureWGD}, TypeError, r"such as FeatureWGD\(\)"),
        ({"method": "dice"}, TypeError, "method must be"),
        ({"module": 3}, TypeError, "module must be a function or class"),
        ({"module": nn.Linear(4, 2)}, TypeError, "module must be a function or class"),
        ({"module": lambda inputs: "mlp"}, TypeError, "must return a torch.nn.Module; got str"),
        ({"module": lambda inputs: nn.Flatten(0)}, ValueError, r"features \(N, H\); it returned a tensor \(8,\)"),
        ({"members": 0}, ValueError, "members must be an integer of at least 1; got 0"),
        ({"method": Single(), "members": 3}, ValueError, "Single trains one network"),
        ({"epochs": 1.5}, ValueError, "epochs must be an integer"),
        ({"batch": True}, ValueError, "batch must be an integer"),
        ({"patience": 0}, ValueError, "patience must be an integer"),
        ({"learning_rate": 0}, ValueError, "learning_rate must be a finite number above 0"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction must be a number from 0 to below 1"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(parameters, error, message):
    with pytest.raises(error, match=message):
        classifier(**parameters).fit(*IRIS)


@pytest.mark.parametrize("method", [ADP(), DICE()])
def test_methods_for_classes_are_refused_by_the_regressor(method):
    with pytest.raises(ValueError, match="one class per example only"):
        regressor(method).fit(*DIABETES)


def test_other_bad_input():
    with pytest.raises(ValueError, match="at least two classes in y; got 1 class"):
        classifier().fit(IRIS[0], np.zeros(150))
    with pytest.raises(TypeError, match="sample_weight"):
        classifier().fit(*IRIS, sample_weight=np.ones(150))
    with pytest.raises(DivergenceError, match="smaller learning_rate"):
        regressor(learning_rate=1e30).fit(*DIABETES)


def test_scikit_learn_is_imported_on_first_access():
    code = "import sys, featureflock.integrations; assert not {'sklearn', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
