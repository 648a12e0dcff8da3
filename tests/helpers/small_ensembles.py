"""Runs of small convolutional networks on digits. Each distinct recipe is trained once per session and then copied."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from featureflock.data import Digits
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import CNNConfig
from featureflock.training import Recipe, train

SMALL = Recipe(
    data=Digits(), model=CNNConfig(4), method=DeepEnsembles(), members=3, epochs=3, batch=64, subset=400, validation=100
)

_session = tempfile.TemporaryDirectory(prefix="featureflock-small-runs-")
_trained: dict[str, Path] = {}


def train_small(folder, methods=(DeepEnsembles(), FeatureWGD()), seeds=(0, 1), **changes):
    """One run for each method and seed; returns their folders, method by method."""
    folders = []
    for method in methods:
        for seed in seeds:
            folders.append(folder / f"{type(method).__name__}-{seed}")
            copy_run(replace(SMALL, method=method, seed=seed, **changes), folders[-1])
    return folders


def copy_run(recipe, folder):
    """A finished run of a recipe."""
    key = json.dumps(recipe.to_json(), sort_keys=True)
    if key not in _trained:
        _trained[key] = Path(_session.name, str(len(_trained)))
        train(recipe, _trained[key])
    shutil.copytree(_trained[key], folder)
