"""Errors of the training loop: divergence, folders in use, wrong recipes and devices."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.short_runs import SHORT, RecordingReporter
from torch import nn

from featureflock.data import Digits
from featureflock.methods import DeepEnsembles, FeatureWGD, WeightWGD
from featureflock.models import CustomModelConfig
from featureflock.training import ComputeConfig, DivergenceError, train
from featureflock.training.checkpoint import read_newest


def test_non_finite_predictions_in_evaluation_are_reported(tmp_path):
    class FailsInEvaluation(nn.Linear):
        feature_dim = 4

        def forward(self, x):
            return super().forward(x.flatten(1)) * (1 if self.training else math.nan)

    with pytest.raises(DivergenceError, match="The predictions of member 0 are not finite in evaluation"):
        train(replace(SHORT, model=CustomModelConfig(lambda: FailsInEvaluation(64, 4)), epochs=1), tmp_path)


def test_two_recipes_that_start_at_the_same_time_are_not_mixed(tmp_path):
    """The second process finds a run of another recipe once it has the lock."""
    other = replace(SHORT, seed=9)

    class Slow(Digits):
        def load(self):
            train(SHORT, tmp_path / "run")  # what another process does while this one loads its data
            return super().load()

    with pytest.raises(ValueError, match="already contains a run"):
        train(replace(other, data=Slow()), tmp_path / "run")


def test_divergence_is_reported_with_step_and_learning_rate(tmp_path):
    with pytest.raises(DivergenceError, match=r"The loss.* not finite at step \d+ \(epoch \d+, learning rate 1e\+06\)"):
        train(
            replace(SHORT, method=DeepEnsembles(), learning_rate=1e6, epochs=30),
            tmp_path,
            compute=ComputeConfig(checkpoint_minutes=0),
        )
    checkpoint, _ = read_newest(tmp_path / "checkpoints")
    assert all(torch.isfinite(t).all() for t in checkpoint.tensors.values())


@pytest.mark.parametrize("method", [DeepEnsembles(), FeatureWGD(), WeightWGD()], ids=lambda m: type(m).__name__)
def test_the_member_that_diverges_is_named(method, tmp_path):
    made = []

    class Breaks(nn.Linear):
        feature_dim = 6

        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            out = super().forward(x.flatten(1))
            return out * math.inf if made.index(self) == 1 and self.calls == 8 else out

    def make():
        made.append(Breaks(64, 6))
        return made[-1]

    with pytest.raises(
        DivergenceError, match=r"of member 1 was not finite at step 8 \(epoch 2, learning rate 0.1\).* checkpoint is in"
    ):
        train(replace(SHORT, method=method, model=CustomModelConfig(make)), tmp_path)
    checkpoint, _ = read_newest(tmp_path / "checkpoints")
    assert checkpoint.metadata["step"] == 5  # the end of the first epoch


def test_a_folder_that_contains_a_run_is_not_changed(tmp_path):
    train(replace(SHORT, epochs=1), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="already contains a run; add --resume"):
        train(replace(SHORT, epochs=1), tmp_path / "run")
    with pytest.raises(ValueError, match="another recipe: epochs is 2 instead of 1"):
        train(SHORT, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"method.rank is 2 instead of 5; epochs is 2"):
        train(replace(SHORT, method=FeatureWGD(rank=2)), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="is a file"):
        train(SHORT, tmp_path / "run" / "recipe.json")
    with pytest.raises(ValueError, match="contains other files"):
        train(SHORT, tmp_path)
    reporter = RecordingReporter()
    result = train(replace(SHORT, epochs=1), tmp_path / "run", resume=True, reporter=reporter)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert "already finished" in reporter.notes[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"learning_rate": math.nan}, "learning_rate must be a positive"),
        ({"learning_rate": -0.1}, "learning_rate must be a positive"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"momentum": 0.0}, "Nesterov"),
        ({"weight_decay": -1e-4}, "weight_decay must"),
        ({"decay_epochs": (20, 10)}, "decay_epochs must be increasing"),
        ({"schedule": "cosine"}, 'schedule must be "steps" or "one-cycle"; got cosine'),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1"),
        ({"warmup": math.nan}, "warmup must be at least 0 and below 1"),
        ({"schedule": "one-cycle", "decay_epochs": (1,)}, "one-cycle schedule takes no decay_epochs; got \\(1,\\)"),
        ({"members": 0}, "members must be 1 to 1,000"),
        ({"seed": -1}, "seed must be 0 to 3,999,999; got -1"),
        ({"subset": 0}, "subset must be at least 1"),
        ({"batch": 10**12}, "batch must be at most 1,000,000,000; got 1000000000000"),
        ({"epochs": 10**30}, "epochs must be at most 1,000,000,000"),
    ],
)
def test_invalid_recipes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SHORT, **wrong)


@pytest.mark.parametrize("batch", [1, 50])
def test_a_training_set_of_one_example_is_refused(tmp_path, batch):
    with pytest.raises(
        ValueError, match=r"The training set has 1 example; training needs at least two\. Choose a larger"
    ):
        train(replace(SHORT, subset=1, batch=batch), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(replace(SHORT, subset=2, batch=batch, epochs=1), tmp_path / "run")["train"]["examples"] == 2


def test_unavailable_devices_are_refused(tmp_path):
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ValueError, match=f"The device {device} is not available"):
            train(SHORT, tmp_path / "run", compute=ComputeConfig(device=device))
    with pytest.raises(ValueError, match="The device meta stores no values, so nothing can be computed on it"):
        train(SHORT, tmp_path / "run", compute=ComputeConfig(device="meta"))
    with pytest.raises(ValueError, match="--compile on does not work with --execution vectorised"):
        train(SHORT, tmp_path / "run", compute=ComputeConfig(compile="on", execution="vectorised"))
    assert not (tmp_path / "run").exists()
