"""Small corrupted sets for tests: published files, and manifests of generated sets."""

import numpy as np

from featureflock.corruptions.manifest import FORMAT, VERSION, write_manifest
from helpers.published_formats import random_arrays

ARRAYS = random_arrays("cifar10", 10, 7)
X, Y = ARRAYS["test_x"], ARRAYS["test_y"]
THREE = ("gaussian_noise", "frost", "contrast")


def no_messages(text):
    """A log function that must not be called."""
    raise AssertionError(text)


def published(folder, count=4, severities=5, names=THREE, dtype=np.uint8):
    """Write a set in the published layout, and return its arrays."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    arrays = {name: rng.integers(0, 256, (severities * count, 32, 32, 3)).astype(dtype) for name in names}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "labels.npy", np.tile(np.arange(count, dtype=np.uint8), severities))
    return arrays


def manifest(folder, **changes):
    """Write a manifest of a generated set, with a valid digest."""
    header = {"format": FORMAT, "version": VERSION, "severities": [1], "files": {}, "source": "", "labels": ""}
    write_manifest(folder, header | changes)
