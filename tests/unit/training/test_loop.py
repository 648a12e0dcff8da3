"""The training loop: what it computes and writes, for any method, compute options, data and network."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.short_runs import SHORT, RecordingReporter, same, weights
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

import featureflock as ff
from featureflock.data import CustomData, permutation
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Single, WeightWGD
from featureflock.models import CNNConfig, CustomModelConfig, MLPConfig, linear_head
from featureflock.training import ComputeConfig, Recipe, train
from featureflock.training.build import build


def test_training_is_sgd_with_the_schedule_and_order_of_the_recipe(tmp_path):
    """Against a naive loop with explicit momentum, schedule and order."""
    recipe = replace(
        SHORT,
        epochs=4,
        decay_epochs=(1, 3),
        decay_ratio=0.5,
        learning_rate=0.2,
        momentum=0.8,
        weight_decay=0.01,
        seed=7,
    )
    train(recipe, tmp_path / "run")
    splits = recipe.data.load().split(subset=240)
    ens, method = build(recipe, splits), recipe.method
    speed = {p: torch.zeros_like(p) for p in ens.parameters()}
    for epoch, rate in enumerate([0.2, 0.1, 0.1, 0.05]):
        for positions in permutation(240, 7, 1, epoch).split(50):
            x = splits.train.x[positions].float() / 16
            ens.zero_grad()
            method.loss(ens, x, splits.train.labels[positions]).loss.backward()
            with torch.no_grad():
                for p in ens.parameters():
                    gradient = p.grad + 0.01 * p
                    speed[p] = 0.8 * speed[p] + gradient
                    p -= rate * (gradient + 0.8 * speed[p])
    trained = weights(tmp_path / "run")
    for name, tensor in ens.state_dict().items():
        assert_close(trained[name], tensor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [MLPConfig((16, 8)), CNNConfig(4)], ids=repr)
def test_reported_metrics_are_those_of_the_saved_ensemble(model, tmp_path):
    recipe = replace(SHORT, validation=100, members=2, model=model)
    result = train(recipe, tmp_path, compute=ComputeConfig(test_every=1))
    ens, splits = ff.load(tmp_path / "ensemble"), recipe.data.load()
    x, y = splits.test.x.float() / 16, splits.test.labels
    probs = ens.predict(x)
    assert result["test"]["accuracy"] == pytest.approx(100 * float((probs.argmax(-1) == y).double().mean()))
    assert result["test"]["nll"] == pytest.approx(float(F.nll_loss(probs.log(), y)), rel=1e-4)
    member = ens.eval()(x)[1].detach().log_softmax(-1)
    assert result["test"]["member_nll"][1] == pytest.approx(float(F.nll_loss(member, y)), rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[-1]["test"] == result["test"]
    assert lines[-1]["validation"]["examples"] == 100
    assert lines[1]["cross_entropy"] < lines[0]["cross_entropy"]


def test_training_metrics_are_averages_over_the_epoch(tmp_path):
    """With a negligible learning rate, the averages of an epoch are those of the initial weights."""
    recipe = replace(SHORT, method=DeepEnsembles(), epochs=1, learning_rate=1e-30)
    reporter = RecordingReporter()
    train(recipe, tmp_path, reporter=reporter)
    splits = recipe.data.load().split(subset=240)
    logits = build(recipe, splits)(splits.train.x.float() / 16).detach()
    y = splits.train.labels
    ce = torch.stack([F.cross_entropy(member, y) for member in logits])
    (line,) = reporter.lines
    assert line["cross_entropy"] == pytest.approx(float(ce.mean()), rel=1e-5)
    assert line["loss"] == pytest.approx(float(ce.sum()), rel=1e-5)  # what Deep Ensembles back-propagate
    correct = (logits.softmax(-1).mean(0).argmax(-1) == y).double().mean()
    assert line["accuracy"] == pytest.approx(100 * float(correct))
    assert reporter.steps[-1] == (5, pytest.approx(line["cross_entropy"]), pytest.approx(line["accuracy"]))
    assert reporter.closed == 1


def test_averages_restart_with_each_epoch(tmp_path):
    recipe, reporter = replace(SHORT, method=DeepEnsembles(), learning_rate=1e-30), RecordingReporter()
    train(recipe, tmp_path, reporter=reporter)
    splits = recipe.data.load().split(subset=240)
    first = permutation(240, 0, 1, 1)[:50]  # of the second epoch
    logits = build(recipe, splits)(splits.train.x[first].float() / 16).detach()
    ce = F.cross_entropy(logits.flatten(0, 1), splits.train.labels[first].repeat(3))
    assert reporter.steps[5][1] == pytest.approx(float(ce), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Other programs cannot find")
def test_dropout_differs_between_steps_and_not_between_runs(tmp_path):
    masks = []

    class Dropped(nn.Linear):
        feature_dim = 8

        def forward(self, x):
            out = F.dropout(torch.ones(len(x), 8), 0.5, self.training)
            if self.training:
                masks.append(out)
            return super().forward(x.flatten(1)) * out

    recipe = replace(SHORT, model=CustomModelConfig(lambda: Dropped(64, 8)), members=2, epochs=1)
    train(recipe, tmp_path / "a")
    first = list(masks)
    masks.clear()
    train(recipe, tmp_path / "b")
    assert len(first) == 10
    assert all(torch.equal(a, b) for a, b in zip(first, masks, strict=True))
    assert len({mask[:40].numpy().tobytes() for mask in first}) == 10


@pytest.mark.parametrize(
    "method",
    [Single(), DeepEnsembles(), FeatureWGD(), FunctionWGD(), WeightWGD(), FeatureMAP(), ADP(), DICE()],
    ids=repr,
)
def test_every_method_learns_in_the_same_loop(method, tmp_path):
    members = 1 if isinstance(method, Single) else 3
    model = CNNConfig(4) if isinstance(method, FeatureWGD | DICE) else MLPConfig((16, 8))
    recipe = replace(SHORT, method=method, model=model, members=members, subset=None, epochs=4, batch=64)
    result = train(recipe, tmp_path)
    assert result["test"]["accuracy"] > 75
    assert len(result["test"]["member_accuracy"]) == members


def test_a_seed_determines_the_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(SHORT, seed=seed), tmp_path / name)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_members_of_deep_ensembles_are_networks_trained_alone(tmp_path):
    train(replace(SHORT, method=DeepEnsembles()), tmp_path / "three")
    train(replace(SHORT, method=Single(), members=1), tmp_path / "one")
    three, one = weights(tmp_path / "three"), weights(tmp_path / "one")
    assert all(torch.equal(three[name], tensor) for name, tensor in one.items())


def test_the_global_random_state_is_unchanged(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(replace(SHORT, epochs=1), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "compute",
    [ComputeConfig(channels_last="off"), ComputeConfig(execution="vectorised"), ComputeConfig(execution="low_memory")],
    ids=repr,
)
def test_compute_options_change_rounding_only(compute, tmp_path):
    recipe = replace(SHORT, model=CNNConfig(4), epochs=1)
    a, b = train(recipe, tmp_path / "a"), train(recipe, tmp_path / "b", compute=compute)
    assert a["train"]["cross_entropy"] == pytest.approx(b["train"]["cross_entropy"], rel=1e-3)
    for name, tensor in weights(tmp_path / "a").items():
        assert_close(weights(tmp_path / "b")[name], tensor, atol=2e-3, rtol=2e-3)


def test_bfloat16_is_close_to_float32(tmp_path):
    recipe = replace(SHORT, epochs=1)
    a, b = (train(replace(recipe, precision=p), tmp_path / p) for p in ("float32", "bfloat16"))
    assert a["train"]["cross_entropy"] != b["train"]["cross_entropy"]
    assert a["train"]["cross_entropy"] == pytest.approx(b["train"]["cross_entropy"], rel=0.02)
    assert all(t.dtype == torch.float32 for t in weights(tmp_path / "bfloat16").values() if t.is_floating_point())


def test_resolved_compute_options_are_logged_and_stored(tmp_path):
    reporter = RecordingReporter()
    train(replace(SHORT, model=CNNConfig(4), epochs=1), tmp_path, reporter=reporter)
    assert reporter.notes == ["Computing on cpu, float32, channels_last, 1 thread."]
    (environment,) = json.loads((tmp_path / "environment.json").read_text())
    assert environment["compute"]["channels_last"] is True
    assert environment["versions"]["torch"] == torch.__version__


def test_custom_arrays_and_modules(tmp_path):
    x = torch.randn(300, 5)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    def extractor():
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU())

    recipe = Recipe(
        CustomData((x, y), (x, y)),
        CustomModelConfig(extractor, lambda: nn.Linear(16, 4)),
        members=3,
        epochs=6,
        batch=16,
    )
    assert train(recipe, tmp_path)["test"]["accuracy"] > 85
    short = replace(recipe, epochs=1)
    train(short, tmp_path / "arrays")
    train(replace(short, data=CustomData(TensorDataset(x, y), TensorDataset(x, y))), tmp_path / "dataset")
    assert same(weights(tmp_path / "arrays"), weights(tmp_path / "dataset"))
    with pytest.raises(ValueError, match="another recipe: data"):
        train(replace(recipe, data=CustomData((x + 1, y), (x, y))), tmp_path, resume=True)


def test_a_custom_module_needs_feature_dim_or_a_head(tmp_path):
    recipe = replace(SHORT, model=CustomModelConfig(lambda: nn.Flatten()))
    with pytest.raises(ValueError, match="Flatten has no integer attribute feature_dim"):
        train(recipe, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_linear_head_starts_without_bias():
    assert not linear_head(8, 3).bias.any()


def test_numpy_arrays_lists_and_other_dtypes_are_accepted(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(64, 4)), np.arange(64, dtype=np.int32) % 2
    recipe = Recipe(CustomData([x, y], (torch.as_tensor(x).half(), y)), MLPConfig((8,)), members=2, epochs=1, batch=16)
    train(recipe, tmp_path / "a")
    assert {t.dtype for t in weights(tmp_path / "a").values()} == {torch.float32}
    with pytest.raises(ValueError, match=r"another recipe: data\.train"):
        train(replace(recipe, data=CustomData([x + 1, y], (x, y))), tmp_path / "a", resume=True)


def test_a_last_batch_of_one_example_is_skipped(tmp_path):
    x, y = torch.randn(33, 4), torch.arange(33) % 2

    def extractor():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())

    recipe = Recipe(
        CustomData((x, y), (x, y)), CustomModelConfig(extractor, lambda: nn.Linear(8, 2)), members=2, epochs=1, batch=16
    )
    reporter = RecordingReporter()
    train(recipe, tmp_path, reporter=reporter)
    assert reporter.plan.steps == 3
    assert reporter.lines[0]["step"] == 3


@pytest.mark.filterwarnings("ignore:Other programs cannot find")
def test_a_buffer_may_be_infinite(tmp_path):
    class Masked(nn.Linear):
        feature_dim = 4

        def __init__(self):
            super().__init__(64, 4)
            self.register_buffer("mask", torch.full((3,), -math.inf))

        def forward(self, x):
            return super().forward(x.flatten(1)) + self.mask.exp().sum()

    train(replace(SHORT, model=CustomModelConfig(Masked), epochs=1), tmp_path)
