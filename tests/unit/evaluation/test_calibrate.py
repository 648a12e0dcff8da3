"""featureflock.calibrate: the temperature of a user's own ensemble, used by predict and saved with it."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.testing import assert_close

import featureflock as ff


@pytest.fixture
def ens():
    torch.manual_seed(0)
    return ff.Ensemble([nn.Sequential(nn.Linear(5, 8), nn.Tanh()) for _ in range(3)], nn.Linear(8, 4)).double()


@pytest.fixture
def batches(ens):
    """Labels from probabilities that are flatter than the ensemble's."""
    torch.manual_seed(1)
    x = 3 * torch.randn(400, 5, dtype=torch.float64)
    y = torch.multinomial(ens.predict(x).sqrt(), 1)[:, 0]
    return list(zip(x.split(70), y.split(70), strict=True))


def nll_at(ens, batches, temperature):
    total, count = 0.0, 0
    for x, y in batches:
        log_p = ens.member_predictions(x).exp().mean(0).log()
        total -= (log_p / temperature).log_softmax(-1)[range(len(y)), y].sum().item()
        count += len(y)
    return total / count


def test_the_temperature_minimises_the_nll(ens, batches):
    found = ff.calibrate(ens, batches)
    best = minimize_scalar(lambda t: nll_at(ens, batches, t), bounds=(0.05, 20), method="bounded").x
    assert found == pytest.approx(best, rel=1e-4)
    assert found > 1.2  # too sure, by construction
    assert ens.temperature == found


def test_predict_uses_the_temperature_and_classes_stay_the_same(ens, batches):
    x = batches[0][0]
    before = ens.predict(x)
    temperature = ff.calibrate(ens, batches)
    after = ens.predict(x)
    powered = before ** (1 / temperature)
    assert_close(after, powered / powered.sum(-1, keepdim=True))
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    ens.temperature = 1
    assert torch.equal(ens.predict(x), before)


def test_uncertainty_and_members_do_not_change(ens, batches):
    x = batches[0][0]
    before = ens.uncertainty(x)
    ff.calibrate(ens, batches)
    for a, b in zip(before, ens.uncertainty(x), strict=True):
        assert torch.equal(a, b)


def test_calibrating_again_gives_the_same(ens, batches):
    assert ff.calibrate(ens, batches) == ff.calibrate(ens, batches)


def test_batching_does_not_matter(ens, batches):
    whole = [tuple(torch.cat(part) for part in zip(*batches, strict=True))]
    assert ff.calibrate(ens, batches) == pytest.approx(ff.calibrate(ens, whole), rel=1e-9)


def test_a_data_loader_and_the_mode_of_the_ensemble(ens, batches):
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    ens.train()
    assert ff.calibrate(ens, loader) == pytest.approx(ff.calibrate(ens, batches), rel=1e-9)
    assert ens.training


def test_the_temperature_is_saved_and_loaded(ens, batches, tmp_path):
    ff.save(ens, tmp_path / "raw")
    assert ff.load(tmp_path / "raw").temperature == 1
    temperature = ff.calibrate(ens, batches)
    ff.save(ens, tmp_path / "calibrated")
    loaded = ff.load(tmp_path / "calibrated")
    assert loaded.temperature == temperature
    x = batches[0][0]
    assert torch.equal(loaded.predict(x), ens.predict(x))


def test_the_temperature_is_loaded_into_a_given_ensemble(ens, batches, tmp_path):
    temperature = ff.calibrate(ens, batches)
    ens.extractors[0].odd = lambda: None
    with pytest.warns(UserWarning, match="Saving weights only"):
        ff.save(ens, tmp_path / "ens")
    blank = ff.Ensemble([nn.Sequential(nn.Linear(5, 8), nn.Tanh()) for _ in range(3)], nn.Linear(8, 4)).double()
    assert ff.load(tmp_path / "ens", into=blank).temperature == temperature


def test_nested_inputs_are_supported_and_empty_batches_skipped(batches):
    class Both(nn.Module):
        def forward(self, x):
            return x["a"] + x["b"]

    ens = ff.Ensemble([Both()], nn.Linear(5, 4).double())
    pairs = [({"a": x, "b": x}, y) for x, y in batches]
    empty = ({"a": torch.zeros(0, 5), "b": torch.zeros(0, 5)}, torch.zeros(0, dtype=torch.int64))
    assert ff.calibrate(ens, [*pairs, empty]) == ff.calibrate(ens, pairs)
    with pytest.raises(ValueError, match="gave no batch"):
        ff.calibrate(ens, [empty])
    with pytest.raises(ValueError, match="calibrate takes an Ensemble; got Linear"):
        ff.calibrate(nn.Linear(2, 2), pairs)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, None, True, "2"])
def test_only_positive_finite_temperatures(ens, wrong):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        ens.temperature = wrong


def test_invalid_data_are_refused_and_the_temperature_is_unchanged(ens, batches):
    ens.temperature = 2.0
    x, y = batches[0]
    for loader, message in (
        ([], "gave no batch"),
        ([x], r"batches \(inputs, targets\)"),
        ([(x, y.tolist())], r"batches \(inputs, targets\)"),
        ([(x[0], y[0])], r"batches \(inputs, targets\)"),
        ([(x, y + 4)], "must be 0 to 3"),
        ([(x, y[:5])], "Outputs must have shape"),
        ([(x * math.nan, y)], "inputs contain NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            ff.calibrate(ens, loader)
        assert ens.temperature == 2.0
