"""The memory that training needs, and networks and batches that cannot fit."""

from dataclasses import replace

import pytest
import torch
from helpers.limits import within_memory
from helpers.short_runs import SHORT
from torch import nn

from featureflock.methods import DeepEnsembles
from featureflock.models import (
    CifarResNetConfig,
    CNNConfig,
    CustomModelConfig,
    MLPConfig,
    RankOneConfig,
    WideResNetConfig,
)
from featureflock.training import ComputeConfig, memory, train
from featureflock.training.memory import check_memory, device_memory

SPLITS = SHORT.splits()
BYTES = 4 * (64 * 16 + 16 + 16 * 8 + 8)
"""Of the parameters of a network."""
STORED = 4 * 50 * (64 + 16 + 8)
"""Activations of a network for a batch of 50: the flat input, and the outputs of both ReLUs."""


@pytest.fixture
def limit(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(memory, "device_memory", lambda device: size)

    return set_to


def test_weights_gradients_and_momentum_of_all_members_are_counted(limit):
    limit(9 * BYTES - 1)
    with pytest.raises(ValueError, match=r"3 networks of 1,176 parameters need at least .* and cpu has"):
        check_memory(SHORT, SPLITS, ComputeConfig())
    with pytest.raises(ValueError, match="3 networks"):
        check_memory(SHORT, SPLITS, ComputeConfig(), (1, 2))
    check_memory(replace(SHORT, momentum=0.0, nesterov=False, batch=1), SPLITS, ComputeConfig())
    check_memory(replace(SHORT, batch=1), SPLITS, ComputeConfig(), (3, 1))
    limit(9 * BYTES)
    check_memory(replace(SHORT, batch=1), SPLITS, ComputeConfig())


def test_activations_of_a_batch_are_counted(limit):
    limit(max(9 * BYTES, 3 * STORED - 1))
    with pytest.raises(ValueError, match=r"A batch of 50 examples needs at least .* for the activations of 3 networks"):
        check_memory(SHORT, SPLITS, ComputeConfig())
    check_memory(SHORT, SPLITS, ComputeConfig(execution="low_memory"))
    check_memory(SHORT, SPLITS, ComputeConfig(), (1, 2))
    check_memory(replace(SHORT, precision="bfloat16"), SPLITS, ComputeConfig())
    limit(3 * STORED)
    check_memory(SHORT, SPLITS, ComputeConfig())
    with pytest.raises(ValueError, match="A batch of 240 examples"):  # all there are
        check_memory(replace(SHORT, batch=10**9), SPLITS, ComputeConfig())


def test_shared_networks_are_counted_once(limit):
    limit(3 * BYTES + 1000)
    recipe = replace(SHORT, model=RankOneConfig(SHORT.model), batch=1, method=DeepEnsembles())
    check_memory(recipe, SPLITS, ComputeConfig())
    with pytest.raises(ValueError, match="3 networks"):
        check_memory(SHORT, SPLITS, ComputeConfig())


def test_absurd_sizes_are_refused_at_once(tmp_path):
    """Before any memory is allocated, and whatever the machine has."""
    for recipe in (
        replace(SHORT, model=MLPConfig((10**6, 10**6))),
        replace(SHORT, model=CNNConfig(10**6)),
        replace(SHORT, model=WideResNetConfig(16, 10**5), members=10),
    ):
        message = within_memory(500, lambda recipe=recipe: train(recipe, tmp_path / "run"))
        assert "parameters need at least" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        lambda: WideResNetConfig(depth=1_000_000),
        lambda: CifarResNetConfig(depth=1_000_004),
        lambda: CNNConfig(width=10**9),
        lambda: MLPConfig((64, 10**30)),
    ],
)
def test_absurd_networks_are_refused_by_their_configuration(config):
    with pytest.raises(ValueError, match=r"must be at most [\d,]+.*; got 1,000,00"):
        config()


def test_user_defined_networks_are_not_built_more_often(limit):
    built = []

    def make():
        built.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)))
        built[-1].feature_dim = 8
        return built[-1]

    limit(1)
    check_memory(replace(SHORT, model=CustomModelConfig(make)), SPLITS, ComputeConfig())
    assert built == []


def test_the_memory_of_this_machine_and_of_a_container(monkeypatch, tmp_path):
    machine = device_memory(torch.device("cpu"))
    assert machine > 2**28
    (tmp_path / "limit").write_text("1000000\n")
    monkeypatch.setattr(memory, "_CGROUPS", (str(tmp_path / "limit"), str(tmp_path / "missing")))
    assert device_memory(torch.device("cpu")) == 1_000_000
    (tmp_path / "limit").write_text("max\n")
    assert device_memory(torch.device("cpu")) >= machine
    assert device_memory(torch.device("meta")) is None
