"""A recipe: everything that decides what a training run computes, in one frozen dataclass.

Two runs of one recipe on one machine end with the same weights. How fast it gets there is the `Engine`'s business.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from featureflock.data import DataSet, Digits, Splits, content_digest
from featureflock.methods import FeatureWGD, Method
from featureflock.models import MLPConfig, ModelConfig

Precision = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["steps", "one-cycle"]


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how.

    SGD with momentum. The learning rate at e of the E epochs, with η₀ = learning_rate and w = warmup:

        steps        η₀ · decay_ratio^(number of decay epochs ≤ e)
        one-cycle    η₀ · min(s/w, (1 − s)/(1 − w)),  s = e/E        straight up to η₀, then straight down to 0

    A step counts at its middle: step b of the B of epoch e is at e + (b + ½)/B.
    """

    data: DataSet = Digits()
    """Data set."""
    model: ModelConfig = MLPConfig()
    """Network of each member, without its last linear layer."""
    method: Method = FeatureWGD()
    """What makes an ensemble of the members."""
    members: int | None = None
    """Members of the ensemble; None for the method's usual number, the paper's 10, or 1 for single networks."""
    epochs: int = 60
    """Passes over the training set."""
    batch: int = 128
    """Examples in a batch. The last batch of an epoch may be smaller."""
    learning_rate: float = 0.1
    """Learning rate before any decay; with one-cycle the highest."""
    schedule: Schedule = "steps"
    """Learning rate in steps, which decay_epochs says, or in one cycle of a rise and a fall."""
    warmup: float = 0.2
    """Share of the steps of a one-cycle schedule in which the learning rate rises."""
    decay_epochs: tuple[int, ...] = ()
    """Epochs, counted from 0, at whose beginning the learning rate is multiplied by the decay ratio."""
    decay_ratio: float = 0.1
    """What the learning rate is multiplied by at each decay."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    weight_decay: float = 5e-4
    """λ of the penalty (λ/2) ‖w‖² on all weights."""
    subset: int | None = None
    """Train on so many examples only, as many of each class."""
    validation: int = 0
    """Hold so many examples out of the training set, as many of each class, and measure on them after each epoch."""
    split_seed: int = 0
    """Draws the validation examples and the subset."""
    seed: int = 0
    """Draws everything else: initial weights, order of the data, augmentation, dropout."""
    precision: Precision = "auto"
    """Of the networks' products: float32, or bfloat16 with float32 weights (autocast); auto: what is fastest."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("learning_rate", "decay_ratio"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive finite number; got {getattr(self, name)}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a finite number of at least 0; got {self.weight_decay}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1; got {self.momentum}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("Nesterov's form needs a momentum above 0; switch it off or set momentum, such as 0.9.")
        if any(e < 1 for e in self.decay_epochs) or list(self.decay_epochs) != sorted(set(self.decay_epochs)):
            raise ValueError(f"decay_epochs must be rising numbers from 1, like 150 225; got {self.decay_epochs}.")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f'schedule must be "steps" or "one-cycle"; got {self.schedule!r}.')
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a share of the steps, at least 0 and below 1; got {self.warmup}.")
        if self.schedule == "one-cycle" and self.decay_epochs:
            raise ValueError(
                f"A one-cycle schedule has no decay_epochs; leave them out, or use steps; got {self.decay_epochs}."
            )
        if self.members is not None and not 1 <= self.members <= 1000:
            raise ValueError(f"members must be 1 to 1,000; got {self.members}.")
        if not 0 <= self.seed < 4_000_000 or not 0 <= self.split_seed < 4_000_000:
            raise ValueError(f"Seeds go from 0 to 3,999,999; got {self.seed} and {self.split_seed}.")
        if self.validation < 0 or (self.subset is not None and self.subset < 1):
            raise ValueError(f"subset and validation count examples; got {self.subset} and {self.validation}.")

    @property
    def size(self) -> int:
        """How many members it trains: `members`, or the method's usual number."""
        return self.method.default_members if self.members is None else self.members

    def splits(self) -> Splits:
        """Its data, divided as it says."""
        return self.data.load().split(validation=self.validation, subset=self.subset, seed=self.split_seed)

    def learning_rate_of(self, epoch: float) -> float:
        """η at so many epochs from the start, whole or not."""
        if self.schedule == "steps":
            return self.learning_rate * self.decay_ratio ** sum(e <= epoch for e in self.decay_epochs)
        done = epoch / self.epochs
        if done < self.warmup:
            return self.learning_rate * done / self.warmup
        return self.learning_rate * (1 - done) / (1 - self.warmup)


def describe(value: Any) -> Any:
    """A recipe, or a part of one, as JSON: a dataclass as its class and fields, tensors by their digest."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Recipe) and value.schedule == "steps":  # as recipes were described before others came
            del fields["schedule"], fields["warmup"]
        return {"class": type(value).__name__, **{name: describe(part) for name, part in fields.items()}}
    if isinstance(value, Tensor | np.ndarray):
        return {"shape": list(value.shape), "sha256": content_digest(torch.as_tensor(value))}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    named = value if isinstance(value, type | FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


_FREE = ("folder", "workers")
"""Fields that may differ between a run and its continuation: where files lie and how many processes read them. That the
data are the same is told by their digest."""


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Where two descriptions differ, as "name: ours, not theirs"."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.get("class") == theirs.get("class"):
        keys = [key for key in (*ours, *(key for key in theirs if key not in ours)) if key not in _FREE]
        return [
            line
            for key in keys
            for line in differences(ours.get(key), theirs.get(key), f"{name}.{key}".removeprefix("."))
        ]
    if ours == theirs:
        return []
    return [f"{name} is {_short(ours)} instead of {_short(theirs)}"]


def _short(value: Any) -> str:
    return str(value["class"]) if isinstance(value, dict) and "class" in value else json.dumps(value)
