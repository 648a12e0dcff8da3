"""Shared trunks and rank-one members in the training loop: recipes, checkpoints, rebuilding, evaluation."""

import json
import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.small_ensembles import SMALL
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.ensemble import SharedMembers
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureWGD, WeightWGD
from featureflock.models import (
    CifarResNetConfig,
    CNNConfig,
    MLPConfig,
    ModelConfig,
    RankOneConfig,
    ResNetConfig,
    SharedTrunkConfig,
    WideResNetConfig,
)
from featureflock.models.sharing import split
from featureflock.training import ComputeConfig, Recipe, Reporter, TrainingInterrupted, train
from featureflock.training.build import build, rebuild
from featureflock.training.checkpoint import read_newest
from featureflock.training.run_folder import RunFolder

SHORT = replace(SMALL, epochs=2, subset=200, validation=50)
MODELS = {
    "rank one": RankOneConfig(CNNConfig(4)),
    "trunk": SharedTrunkConfig(CNNConfig(4)),
    "both": RankOneConfig(SharedTrunkConfig(CNNConfig(4), 2), 0.3),
}


class InterruptAt(Reporter):
    def __init__(self, step):
        self.at = step

    def step(self, step, averages):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [DeepEnsembles(), FeatureWGD()])
def test_a_run_resumes_bit_identically_and_is_rebuilt(name, method, tmp_path):
    recipe = replace(SHORT, model=MODELS[name], method=method)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    result = train(recipe, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        train(recipe, tmp_path / "parts", reporter=InterruptAt(3))
    train(recipe, tmp_path / "parts", resume=True)
    whole, parts = (read_newest(tmp_path / run / "checkpoints")[0].tensors for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    x = recipe.splits().test.x[:20].float()
    loaded, rebuilt = ff.load(tmp_path / "whole" / "ensemble"), rebuild(RunFolder(tmp_path / "whole"))
    assert torch.equal(loaded.predict(x), rebuilt.predict(x))
    assert isinstance(loaded.extractors, SharedMembers) == (name != "trunk")
    assert (loaded.trunk is not None) == (name != "rank one")
    assert result["parameters"] == sum(p.numel() for p in loaded.parameters())


@dataclass(frozen=True)
class Adapted(ModelConfig):
    """LoRA members of a network that stands for a pretrained one."""

    def extractor(self, shape):
        return CNNConfig(4).extractor(shape)

    def share(self, extractor, members):
        return ff.lora(extractor, members, 2, ["0", "3", "6"])


def test_lora_members_are_trained_resumed_and_saved(tmp_path):
    recipe = replace(SHORT, model=Adapted(), method=FeatureWGD())
    train(recipe, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        train(recipe, tmp_path / "parts", reporter=InterruptAt(3))
    train(recipe, tmp_path / "parts", resume=True)
    whole, parts = (ff.load(tmp_path / run / "ensemble") for run in ("whole", "parts"))
    for (name, p), q in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    start = build(recipe, recipe.splits())
    for (name, p), q in zip(start.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q) == (not p.requires_grad), name


@pytest.mark.parametrize("name", MODELS)
def test_low_memory_gives_the_same_weights(name, tmp_path):
    recipe = replace(SHORT, model=MODELS[name], method=FeatureWGD(), epochs=1)
    weights = []
    for execution in ("sequential", "low_memory"):
        train(recipe, tmp_path / execution, compute=ComputeConfig(execution=execution))
        weights.append(ff.load(tmp_path / execution / "ensemble").state_dict())
    assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_methods_that_cannot_share_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="weights of their own"):
        train(replace(SHORT, model=MODELS["rank one"], method=WeightWGD()), tmp_path / "a")
    with pytest.raises(ValueError, match="separate extractors"):
        train(replace(SHORT, model=MODELS["rank one"], method=DICE()), tmp_path / "b")
    for method in (DICE(ramp_epochs=1), ADP(), WeightWGD()):
        train(replace(SHORT, model=MODELS["trunk"], method=method, epochs=1), tmp_path / method.title)


def test_members_start_as_they_would_alone():
    """The extractor and the heads of an ensemble that shares weights are those of member 0, and of each member."""
    recipe = replace(SHORT, model=CNNConfig(4))
    splits = recipe.splits()
    plain, shared = build(recipe, splits), build(replace(recipe, model=MODELS["rank one"]), splits)
    conv = shared.extractors.network.layers[0]
    assert torch.equal(conv.base.weight, plain.extractors[0].layers[0].weight)
    again = build(replace(recipe, model=MODELS["rank one"]), splits)
    assert torch.equal(conv.r, again.extractors.network.layers[0].r)
    other = build(replace(recipe, model=MODELS["rank one"], seed=1), splits)
    assert not torch.equal(conv.r, other.extractors.network.layers[0].r)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MLPConfig((12, 8, 4)), (1, 6, 6)),
        (CNNConfig(4), (1, 8, 8)),
        (WideResNetConfig(10, 1), (3, 16, 16)),
        (CifarResNetConfig(14), (3, 16, 16)),
        (ResNetConfig(18), (3, 32, 32)),
    ],
)
def test_trunk_and_rest_are_the_network(config, shape):
    network = config.extractor(shape).eval()
    x = torch.randn(2, *shape)
    expected = network(x)
    trunk, rest = split(network, 2)
    assert_close(rest(trunk(x)), expected)
    assert any(True for _ in trunk.parameters())


def test_wrong_configurations_are_refused():
    with pytest.raises(ValueError, match="std must be"):
        RankOneConfig(std=-1.0)
    with pytest.raises(ValueError, match="blocks must be"):
        SharedTrunkConfig(blocks=0)
    with pytest.raises(ValueError, match="blocks must be 1 to 2"):
        SharedTrunkConfig(CNNConfig(4), 3).extractor((1, 8, 8))
    with pytest.raises(ValueError, match="Linear"):
        split(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="cannot have a trunk itself"):
        SharedTrunkConfig(SharedTrunkConfig()).trunk((1, 8, 8))
