"""Recipes: the paper's settings, and telling two recipes apart."""

import json
from dataclasses import replace

import pytest
from helpers.short_runs import SHORT

import featureflock as ff
from featureflock.data import CustomData, EpochKey
from featureflock.methods import FeatureWGD
from featureflock.models import CNNConfig
from featureflock.training import RECIPES, train
from featureflock.training.recipe import describe, differences


def test_the_papers_settings_are_those_of_its_appendix():
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
    assert ten.learning_rate_of(149) == 0.1
    assert ten.learning_rate_of(150) == pytest.approx(0.01)
    assert hundred.learning_rate_of(299) == pytest.approx(1e-4)
    other = {name: RECIPES[name].recipe for name in ("cifar100-resnet32", "cifar100-wrn28x2")}
    assert other["cifar100-resnet32"].method == FeatureWGD(ff.Cauchy(1e-3), rank=4)
    assert other["cifar100-resnet32"].members == 4
    assert other["cifar100-wrn28x2"].method == FeatureWGD(ff.Cauchy(1e-3), rank=3)
    assert other["cifar100-wrn28x2"].members == 3
    assert RECIPES["cifar100-wrn16x4-normal"].recipe.method == FeatureWGD(ff.Normal(5e-3))
    assert RECIPES["cifar100-wrn16x4-uniform"].recipe.method == FeatureWGD(ff.Uniform())


def test_descriptions_tell_recipes_apart():
    recipes = [entry.recipe for entry in RECIPES.values()]
    texts = [json.dumps(describe(recipe)) for recipe in recipes]
    assert len(set(texts)) == len(texts)
    assert not differences(describe(SHORT), json.loads(json.dumps(describe(SHORT))))
    changed = replace(SHORT, method=FeatureWGD(ff.Cauchy(0.5)), model=CNNConfig())
    assert differences(describe(changed), describe(SHORT)) == [
        "model is CNN instead of MLP",
        "method.prior.precision is 0.5 instead of 0.001",
    ]


def test_augmentation_follows_the_recipes_seed(tmp_path):
    """What the loop asks of the data is (seed, epoch), so that two runs of one seed see the same pictures."""
    asked = []
    recipe = replace(SHORT, seed=3)
    splits = recipe.data.load()
    batches = splits.train.batches
    splits.train.batches = lambda order, device, draw=None: asked.append(draw) or batches(order, device, draw)
    train(replace(recipe, data=CustomData(splits.train, splits.test), subset=None), tmp_path)
    assert [draw for draw in asked if draw is not None] == [EpochKey(3, 0), EpochKey(3, 1)]
