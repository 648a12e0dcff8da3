"""Recipes: the settings of the paper, JSON, and rebuilding a run from its recipe."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers.short_runs import METHODS, SHORT
from torch import nn

import featureflock as ff
from featureflock.data import CIFAR10, DATA_SETS, CustomData, EpochKey, HeldOut, ImageFolder
from featureflock.ensemble import saving
from featureflock.methods import FeatureWGD, Single
from featureflock.models import CNNConfig, CustomModelConfig, FastCNNConfig, MLPConfig, ResNetConfig
from featureflock.training import RECIPES, Recipe, train
from featureflock.training.build import rebuild
from featureflock.training.recipe import recipe_differences
from featureflock.training.run_folder import RunFolder


def test_recipes_of_the_paper_follow_its_appendix():
    """Appendix B: epochs, batch, decay epochs, weight decay; and for each table members, prior and rank."""
    ten, hundred, net = (RECIPES[n].recipe for n in ("cifar10-wrn16x4", "cifar100-wrn16x4", "imagenet-resnet50"))
    for recipe, epochs, batch, decay, weight_decay, members, precision in (
        (ten, 300, 128, (150, 225), 5e-4, 10, 1e-3),
        (hundred, 300, 128, (150, 225, 250), 5e-4, 10, 5e-3),
        (net, 90, 256, (30, 60), 1e-4, 5, 2e-3),
    ):
        assert (recipe.epochs, recipe.batch, recipe.decay_epochs, recipe.weight_decay) == (
            epochs,
            batch,
            decay,
            weight_decay,
        )
        assert (recipe.learning_rate, recipe.decay_ratio, recipe.momentum, recipe.nesterov) == (0.1, 0.1, 0.9, True)
        assert recipe.members == members
        assert recipe.method == FeatureWGD(ff.Cauchy(precision), rank=5)
    assert ten.learning_rate_at(149) == 0.1
    assert ten.learning_rate_at(150) == pytest.approx(0.01)
    assert hundred.learning_rate_at(299) == pytest.approx(1e-4)
    other = {name: RECIPES[name].recipe for name in ("cifar100-resnet32", "cifar100-wrn28x2")}
    assert other["cifar100-resnet32"].method == FeatureWGD(ff.Cauchy(1e-3), rank=4)
    assert other["cifar100-resnet32"].members == 4
    assert other["cifar100-wrn28x2"].method == FeatureWGD(ff.Cauchy(1e-3), rank=3)
    assert other["cifar100-wrn28x2"].members == 3
    assert RECIPES["cifar100-wrn16x4-normal"].recipe.method == FeatureWGD(ff.Normal(5e-3))
    assert RECIPES["cifar100-wrn16x4-uniform"].recipe.method == FeatureWGD(ff.Uniform())


# JSON


def through_json(recipe: Recipe) -> Recipe:
    return Recipe.from_json(json.loads(json.dumps(recipe.to_json())))


@pytest.mark.parametrize("recipe", [entry.recipe for entry in RECIPES.values()], ids=list(RECIPES))
def test_named_recipes_round_trip_through_json(recipe):
    assert through_json(recipe) == recipe


@pytest.mark.parametrize(
    "changes",
    [
        *({"method": method} for method in METHODS),
        {"method": FeatureWGD(ff.Normal(0.5), ff.RBF(2.5), None, "weakest", ff.SVGD(noise=0.1))},
        {"data": HeldOut(CIFAR10(padding=1), 50, seed=3)},
        {"data": ImageFolder(Path("net")), "model": ResNetConfig(18, "cifar")},
        {"members": None, "subset": None, "schedule": "one-cycle", "warmup": 0, "precision": "bfloat16"},
    ],
    ids=str,
)
def test_every_component_round_trips_through_json(changes):
    recipe = replace(SHORT, **changes)
    again = through_json(recipe)
    assert again == recipe
    assert type(again.method) is type(recipe.method)
    assert again.to_json() == recipe.to_json()


@dataclass(frozen=True)
class Unregistered(FeatureWGD):
    pass


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"method": Unregistered()}, "Unregistered"),
        ({"model": CustomModelConfig(lambda: nn.Flatten())}, "CustomModelConfig"),
        (
            {"data": CustomData((torch.zeros(4, 2), torch.arange(4)), (torch.zeros(4, 2), torch.arange(4)))},
            "CustomData",
        ),
    ],
)
def test_unregistered_components_are_refused_with_advice(part, name):
    with pytest.raises(ValueError, match=rf"component {name} is not registered; register it in a module"):
        through_json(replace(SHORT, **part))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": "many"}, r"the recipe\.epochs must be int; got 'many'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"bach": 3}, "has an unknown field 'bach'; Recipe has data"),
        ({"method": 3}, r"the recipe\.method must be Method; got 3"),
    ],
)
def test_wrong_json_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_json({**SHORT.to_json(), **change})


def test_components_of_two_kinds_with_one_class_name_are_refused(monkeypatch):
    """A data set called Cauchy must not become the prior of a recipe."""
    monkeypatch.setitem(DATA_SETS, "cauchy", type("Cauchy", (CIFAR10,), {}))
    with pytest.raises(ValueError, match="Two registered components have the class name Cauchy; rename one"):
        through_json(SHORT)


def test_differences_name_the_fields():
    texts = [json.dumps(entry.recipe.to_json()) for entry in RECIPES.values()]
    assert len(set(texts)) == len(texts)
    assert not recipe_differences(SHORT.to_json(), json.loads(json.dumps(SHORT.to_json())))
    changed = replace(SHORT, method=FeatureWGD(ff.Cauchy(0.5)), model=CNNConfig(), schedule="one-cycle")
    assert recipe_differences(changed.to_json(), SHORT.to_json()) == [
        "model is CNNConfig instead of MLPConfig",
        "method.prior.precision is 0.5 instead of 0.001",
        'schedule is "one-cycle" instead of "steps"',
    ]


def test_arrays_and_functions_are_told_apart_by_digest_and_name():
    x, y = torch.zeros(4, 2), torch.arange(4)
    one, two = (replace(SHORT, data=CustomData((x + k, y), (x, y))).to_json() for k in (0, 1))
    (difference,) = recipe_differences(one, two)
    assert difference.startswith("data.train is ")
    assert replace(SHORT, model=CustomModelConfig(nn.Flatten)).to_json()["model"] == {
        "class": "CustomModelConfig",
        "make_extractor": "torch.nn.modules.flatten.Flatten",
        "make_head": None,
    }


def test_data_sets_must_load_splits(monkeypatch):
    monkeypatch.setattr(type(SHORT.data), "load", lambda self: (torch.zeros(4, 2), torch.arange(4)))
    with pytest.raises(ValueError, match=r"\.load must return Splits; got tuple"):
        SHORT.splits()


# Rebuilding


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_finished_run_is_rebuilt_from_its_recipe_without_the_module_codec(method, tmp_path, monkeypatch):
    model = FastCNNConfig((4, 8)) if type(method) is FeatureWGD else MLPConfig((8,))
    recipe = replace(SHORT, method=method, model=model, members=1 if isinstance(method, Single) else 2, epochs=1)
    train(recipe, tmp_path / "run")
    loaded = ff.load(tmp_path / "run" / "ensemble")
    loaded.temperature = 1.7
    ff.save(loaded, tmp_path / "run" / "ensemble")
    assert json.loads((tmp_path / "run" / "recipe.json").read_text()) == recipe.to_json()
    monkeypatch.setattr(saving.codec, "ModuleDecoder", None)
    again = rebuild(RunFolder(tmp_path / "run"))
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(again.predict(x), loaded.predict(x))
    assert again.temperature == 1.7
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert again.state_dict()[name].stride() == tensor.stride()  # channels_last
    assert getattr(again.layer, "count", None) == getattr(loaded.layer, "count", None)


def test_a_run_with_custom_modules_is_loaded_by_the_codec(tmp_path):
    recipe = replace(SHORT, model=CustomModelConfig(nn.Flatten, lambda: nn.Linear(64, 10)), epochs=1, members=2)
    train(recipe, tmp_path / "run")
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(
        rebuild(RunFolder(tmp_path / "run")).predict(x), ff.load(tmp_path / "run" / "ensemble").predict(x)
    )


def test_augmentation_depends_on_seed_and_epoch(tmp_path):
    requested = []
    recipe = replace(SHORT, seed=3)
    splits = recipe.data.load()
    batches = splits.train.batches
    splits.train.batches = lambda order, device, key=None: requested.append(key) or batches(order, device, key)
    train(replace(recipe, data=CustomData(splits.train, splits.test), subset=None), tmp_path)
    assert [key for key in requested if key is not None] == [EpochKey(3, 0), EpochKey(3, 1)]
