"""Prediction, uncertainty and calibration of every task, in ensembles; saving and loading."""

import math
import subprocess
import sys

import pytest
import torch
from scipy import stats
from scipy.optimize import minimize_scalar
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.evaluation import fit_temperature
from featureflock.tasks import Classification, HeteroscedasticRegression, MultiLabel, Regression

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))


def make(task, outputs, shared=True):
    torch.manual_seed(0)
    extractors = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()) for _ in range(3)]
    head = nn.Linear(8, outputs) if shared else [nn.Linear(8, outputs) for _ in range(3)]
    return ff.Ensemble(extractors, head, ff.ParticleLayer(), task=task)


def member_outputs(ens, x=X):
    return torch.stack([ens.head(f(x)) for f in ens.extractors]).detach()


def test_regression_follows_the_law_of_total_variance():
    ens = make(Regression(variance=0.25), 2)
    f = member_outputs(ens)
    mean, variance = ens.predict(X)
    assert_close(mean, f.mean(0))
    assert_close(variance, 0.25 + f.var(0, correction=0))
    assert_close(ens.predict(X).std, variance.sqrt())
    total, aleatoric, epistemic = ens.uncertainty(X)
    assert_close(aleatoric, torch.full_like(mean, 0.25))
    assert_close(epistemic, f.var(0, correction=0))
    assert_close(total, variance)
    # The variance of many samples of the mixture.
    g = torch.Generator().manual_seed(0)
    samples = f[torch.randint(3, (200_000,), generator=g), 0, 0] + 0.5 * torch.randn(200_000, generator=g)
    assert float(samples.var()) == pytest.approx(float(variance[0, 0]), rel=0.02)


def test_regression_is_not_one_for_every_row():
    ens = make(Regression(), 1)
    mean, _ = ens.predict(X)
    assert mean.std() > 0.01
    assert (ens.uncertainty(X).epistemic > 0).all()


def test_heteroscedastic_regression_predicts_the_noise_of_each_input():
    ens = make(HeteroscedasticRegression(), 4)
    f = member_outputs(ens)
    mean, noise = f[..., :2], (20 * torch.tanh(f[..., 2:] / 20)).exp()
    prediction, uncertainty = ens.predict(X), ens.uncertainty(X)
    assert_close(prediction.mean, mean.mean(0))
    assert_close(uncertainty.aleatoric, noise.mean(0))
    assert_close(prediction.variance, noise.mean(0) + mean.var(0, correction=0))


def test_labels_have_their_own_probabilities():
    ens = make(MultiLabel(), 4)
    p = member_outputs(ens).sigmoid()
    assert_close(ens.predict(X), p.mean(0))
    assert (ens.predict(X).sum(-1) - 1).abs().max() > 0.1

    def entropy(p):
        return -(p * p.log() + (1 - p) * (1 - p).log())

    total, aleatoric, epistemic = ens.uncertainty(X)
    assert_close(total, entropy(p.mean(0)))
    assert_close(aleatoric, entropy(p).mean(0))
    assert_close(epistemic, total - aleatoric, atol=1e-6, rtol=1e-4)


def test_classes_of_pixels_sum_to_one_over_classes():
    torch.manual_seed(0)
    ens = ff.Ensemble([nn.Conv2d(1, 4, 3, padding=1) for _ in range(3)], nn.Conv2d(4, 5, 1))
    x = torch.randn(2, 1, 6, 7)
    p = ens.predict(x)
    assert p.shape == (2, 5, 6, 7)
    assert_close(p, ens(x).detach().softmax(2).mean(0))
    total, aleatoric, _ = ens.uncertainty(x)
    assert_close(total, -(p * p.log()).sum(1))
    each = ens(x).detach().softmax(2)
    assert_close(aleatoric, -(each * each.log()).sum(2).mean(0))


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_the_variance_is_calibrated_to_the_least_nll(scale):
    task = Regression(variance=0.5)
    ens = make(task, 1)
    g = torch.Generator().manual_seed(1)
    mean, variance = ens.predict(X)
    y = mean[:, 0] + (scale * variance[:, 0]).sqrt() * torch.randn(len(X), generator=g)
    found = ff.calibrate(ens, [(X[:25], y[:25]), (X[25:], y[25:])])
    assert ens.variance_scale == found == ens.state_dict()["variance_scale"]
    f = member_outputs(ens)[..., 0].double()

    def nll(c):
        m = f.mean(0)
        means, sd = m + math.sqrt(c) * (f - m), math.sqrt(0.5 * c)
        density = torch.from_numpy(stats.norm(means.numpy(), sd).pdf(y.double().numpy()))
        return float(-density.mean(0).log().mean())

    best = minimize_scalar(nll, bounds=(1e-2, 1e2), method="bounded", options={"xatol": 1e-6}).x
    assert found == pytest.approx(best, rel=1e-3)
    after = ens.predict(X)
    assert_close(after.mean, mean)
    assert_close(after.variance, found * variance)
    for part, before in zip(ens.uncertainty(X), task.uncertainty(ens.member_predictions(X)), strict=True):
        assert_close(part, found * before)


def test_the_generic_calibration_of_classes_is_the_temperature():
    g = torch.Generator().manual_seed(2)
    log_p = (3 * torch.randn(4, 200, 5, generator=g, dtype=torch.float64)).log_softmax(-1)
    y = torch.randint(5, (200,), generator=g)
    expected = fit_temperature(log_p.exp().mean(0).log(), y)
    assert Classification().fit_calibration(log_p, y) == pytest.approx(expected, rel=1e-5)
    pixels = log_p.view(4, 10, 20, 5).movedim(-1, 2)
    assert Classification().fit_calibration(pixels, y.view(10, 20)) == pytest.approx(expected, rel=1e-5)


def test_the_temperature_of_labels_minimises_their_nll():
    ens = make(MultiLabel(), 4)
    with torch.no_grad():
        ens.head.weight.mul_(8)
    y = torch.bernoulli(ens.predict(X).pow(0.5), generator=torch.Generator().manual_seed(3))
    p = member_outputs(ens).double().sigmoid().mean(0)

    def nll(t):
        q = torch.logit(p).div(t).sigmoid()
        return float(-(y * q.log() + (1 - y) * (1 - q).log()).mean())

    found = ff.calibrate(ens, [(X, y)])
    assert found == pytest.approx(minimize_scalar(nll, bounds=(0.02, 50), method="bounded").x, rel=1e-3)
    assert_close(ens.predict(X), torch.logit(p).div(found).sigmoid().float())


TASKS = {
    "classes": (Classification(), 3),
    "labels": (MultiLabel(), 3),
    "learnt": (Regression(initial_variance=0.2), 1),
    "standardised": (Regression(target_mean=(5.0,), target_std=(2.0,)), 1),
    "by-input": (HeteroscedasticRegression(), 2),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", TASKS)
def test_task_calibration_and_variance_are_saved(name, shared, tmp_path):
    ens = make(*TASKS[name], shared=shared)
    setattr(ens, ens.task.calibration, 1.7)
    if ens.log_variance is not None:
        with torch.no_grad():
            ens.log_variance += 0.3
    ff.save(ens, tmp_path / "ens")
    expected = ens.predict(X)
    loaded = ff.load(tmp_path / "ens")
    assert loaded.task == ens.task
    blank = make(*TASKS[name], shared=shared)
    with torch.no_grad():
        for p in blank.parameters():
            p.mul_(0.5)
    through_state = make(*TASKS[name], shared=shared)
    through_state.load_state_dict(ens.state_dict())
    for other in (loaded, ff.load(tmp_path / "ens", into=blank), through_state, ens.for_inference(compile=False)):
        assert other.state_dict()[ens.task.calibration] == pytest.approx(1.7)
        predicted = other.predict(X)
        for a, b in zip(*((p if isinstance(p, tuple) else (p,)) for p in (predicted, expected)), strict=True):
            assert_close(a, b)


def test_weights_without_a_calibration_can_be_loaded():
    ens = make(Classification(), 3)
    weights = ens.state_dict()
    ens.temperature = 3.0
    del weights["temperature"]
    ens.load_state_dict(weights)
    assert ens.temperature == 1


def test_each_task_has_its_own_calibration():
    ens = make(Regression(), 1)
    assert "temperature" not in ens.state_dict()
    with pytest.raises(ValueError, match="Regression has no temperature; set its variance_scale"):
        ens.temperature = 2.0
    with pytest.raises(ValueError, match="task must be a Task"):
        make("regression", 1)


def test_trained_networks_become_an_ensemble(tmp_path):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 5 + i), nn.ReLU(), nn.Linear(5 + i, 3)) for i in range(3)]
    ens = ff.Ensemble.from_models(models)
    assert_close(ens(X), torch.stack([model(X) for model in models]))
    assert_close(ens.predict(X), torch.stack([model(X).softmax(-1) for model in models]).mean(0))
    ff.save(ens, tmp_path / "ens")
    assert_close(ff.load(tmp_path / "ens").predict(X), ens.predict(X))
    numbers = ff.Ensemble.from_models((nn.Linear(6, 1) for _ in range(2)), task=Regression())
    assert numbers.predict(X).mean.shape == (40, 1)
    with pytest.raises(ValueError, match="same extractor was given twice"):
        ff.Ensemble.from_models([models[0], models[0]])


SCRIPT = """
import warnings
import torch
from torch import nn
import featureflock as ff

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
    def forward(self, x):
        return self.linear(x)

class Config:
    width = 3

class Configured(Net):
    def __init__(self):
        super().__init__()
        self.config = Config()

for cls in (Net, Configured):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ff.save(ff.Ensemble.from_models([cls(), cls()]), cls.__name__)
    print(cls.__name__, [str(w.message) for w in caught])
"""


def test_saving_tells_what_cannot_be_rebuilt_and_how_to_load_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    out = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    net, configured = out.strip().splitlines()
    assert "Other programs cannot find Net, defined in a script" in net
    assert "load(folder, into=ensemble)" in net
    assert "extractors.0.config is a Config" in configured
    assert "load(folder, into=…)" in configured
    with pytest.raises(ValueError, match="into=ensemble"):
        ff.load(tmp_path / "Net")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x)

    assert ff.load(tmp_path / "Configured", into=ff.Ensemble.from_models([Net(), Net()])).predict(X).shape == (40, 3)
