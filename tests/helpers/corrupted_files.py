"""Corrupted sets for the tests: what somebody downloaded, and what featureflock says of its own."""

import json

import numpy as np

from featureflock.corruptions.files import FORMAT, VERSION
from helpers.published_formats import collection

RAW = collection("cifar10", 10, 7)
X, Y = RAW["test_x"], RAW["test_y"]
THREE = ("gaussian_noise", "frost", "contrast")


def quiet(text):
    raise AssertionError(text)


def published(folder, count=4, severities=5, names=THREE, dtype=np.uint8):
    """What somebody downloaded."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    arrays = {name: rng.integers(0, 256, (severities * count, 32, 32, 3)).astype(dtype) for name in names}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "labels.npy", np.tile(np.arange(count, dtype=np.uint8), severities))
    return arrays


def manifest(folder, **changes):
    whole = {"format": FORMAT, "version": VERSION, "severities": [1], "files": {}, "source": "", **changes}
    (folder / "featureflock.json").write_text(json.dumps(whole))
