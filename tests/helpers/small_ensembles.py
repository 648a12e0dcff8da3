"""Runs of small convolutional networks on digits, trained in seconds, for the tests of the evaluation."""

from dataclasses import replace

from featureflock.data import Digits
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import CNNConfig
from featureflock.training import Recipe, train

SMALL = Recipe(
    data=Digits(), model=CNNConfig(4), method=DeepEnsembles(), members=3, epochs=3, batch=64, subset=400, validation=100
)


def train_small(folder, methods=(DeepEnsembles(), FeatureWGD()), seeds=(0, 1), **changes):
    """Train one run per method and seed, and return their folders, ordered by method."""
    folders = []
    for method in methods:
        for seed in seeds:
            recipe = replace(SMALL, method=method, seed=seed, **changes)
            folders.append(folder / f"{type(method).__name__}-{seed}")
            train(recipe, folders[-1])
    return folders
