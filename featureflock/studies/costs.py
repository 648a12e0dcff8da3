"""Estimated cost of training, before it starts."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from featureflock.data import HeldOut
from featureflock.models import ModelConfig
from featureflock.training import Recipe
from featureflock.training.build import forward_flops

_A100 = 312e12 * 0.3
"""FLOPs per second of an A100: its bfloat16 peak at an assumed utilisation of 30 %."""
_TWO_CORES = 60e9
"""FLOPs per second of two CPU cores with AVX2, as measured with the recipe cifar10-laptop."""


def cost(recipes: Sequence[Recipe]) -> str:
    """One sentence: FLOPs of training and how long they take."""
    flops = sum(map(estimate_flops, recipes))
    if not flops:
        return "Training takes seconds to minutes."
    return (
        f"Training takes about {flops:.1e} FLOPs: {_duration(flops / _TWO_CORES)} on two CPU cores, or "
        f"{gpu_time(recipes)} on an A100 at an assumed 30 % of its peak. Evaluation takes additional time."
    )


def gpu_time(recipes: Sequence[Recipe]) -> str:
    """Training time on an A100 at an assumed 30 % of its peak."""
    flops = sum(map(estimate_flops, recipes))
    return _duration(flops / _A100) if flops else "minutes"


def estimate_flops(recipe: Recipe) -> float:
    """FLOPs of a run; a backward pass takes twice those of a forward pass. 0 for data of unknown, small size."""
    data = recipe.data.data if isinstance(recipe.data, HeldOut) else recipe.data
    if data.train_size is None or data.input_shape is None:
        return 0.0
    forward = _forward_flops(recipe.model, data.input_shape)
    return 3.0 * forward * (recipe.subset or data.train_size) * recipe.epochs * recipe.size


@lru_cache
def _forward_flops(model: ModelConfig, shape: tuple[int, ...]) -> int:
    with torch.device("meta"):  # counts operations without computing them
        return forward_flops(model.extractor(shape), torch.zeros(1, *shape))


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"
