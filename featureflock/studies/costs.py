"""What runs will cost, before they start."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from featureflock.data import CIFAR10 as CIFAR10Data
from featureflock.data import CIFAR100, Dominoes, HeldOut, ImageFolder
from featureflock.models import ModelConfig
from featureflock.training import Recipe
from featureflock.training.build import forward_flop

_SIZES = {
    CIFAR10Data: (50_000, (3, 32, 32)),
    CIFAR100: (50_000, (3, 32, 32)),
    Dominoes: (50_000, (3, 64, 32)),
    ImageFolder: (1_281_167, (3, 224, 224)),
}
_A100, _CORES = 312e12 * 0.3, 60e9
"""FLOP a second: an A100's peak in bfloat16 at an assumed 30 %; two cores of a CPU with AVX2, as measured here."""


def cost(recipes: Sequence[Recipe]) -> str:
    """One sentence: floating-point operations of training, and how long they take."""
    flop = sum(map(training_flop, recipes))
    if not flop:
        return "That takes seconds to minutes."
    return (
        f"About {flop:.1e} floating-point operations: {_duration(flop / _CORES)} on two CPU cores, or "
        f"{gpu_time(recipes)} on an A100 at an assumed 30 % of its peak; test sets come on top."
    )


def gpu_time(recipes: Sequence[Recipe]) -> str:
    """How long an A100 trains them, at an assumed 30 % of its peak."""
    flop = sum(map(training_flop, recipes))
    return _duration(flop / _A100) if flop else "minutes"


def training_flop(recipe: Recipe) -> float:
    """Of a whole run; a backward pass takes twice the operations of a forward pass. 0 for data that are small."""
    data = recipe.data.data if isinstance(recipe.data, HeldOut) else recipe.data
    if type(data) not in _SIZES:
        return 0.0
    examples, shape = _SIZES[type(data)]
    return 3.0 * _forward(recipe.model, shape) * (recipe.subset or examples) * recipe.epochs * recipe.size


@lru_cache
def _forward(model: ModelConfig, shape: tuple[int, ...]) -> int:
    with torch.device("meta"):  # nothing is drawn or multiplied, only counted
        return forward_flop(model.extractor(shape), torch.zeros(1, *shape))


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"
