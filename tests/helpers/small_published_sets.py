"""Tiny stand-ins for MNIST and CIFAR-10 in the cache."""

import numpy as np

from featureflock.data.sources.cache import store


def small_sets(digits: int = 30, images: int = 20) -> None:
    """Store small MNIST and CIFAR-10 sets in the cache: digit c has the byte 10 c + 5, image k the byte k."""
    for name, count, shape in (("mnist", digits, (28, 28, 1)), ("cifar10", images, (32, 32, 3))):
        raw = {}
        for part, size in (("train", count), ("test", count // 2)):
            labels = (np.arange(size) % 10).astype(np.uint8)
            byte = 10 * labels + 5 if name == "mnist" else np.arange(size).astype(np.uint8)
            raw[f"{part}_x"] = np.broadcast_to(byte[:, None, None, None], (size, *shape)).copy()
            raw[f"{part}_y"] = labels
        store(name, raw, source="made for a test", published=False)
