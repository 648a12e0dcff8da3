"""A recipe: one frozen dataclass with everything that determines the result of a training run.

    recipe = Recipe(data=CIFAR10(), model=WideResNetConfig(16, 4), method=FeatureWGD(), members=10, epochs=300)
    Recipe.from_json(recipe.to_json()) == recipe

Two runs of one recipe on one machine give bit-identical weights. Speed is the subject of `ComputeConfig`.
"""

import json
import math
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal, TypedDict, cast, get_args

import numpy as np
import torch
from torch import Tensor

from featureflock.core import KERNELS, PRIORS, RULES
from featureflock.data import DATA_SETS, DataSet, Digits, Splits, content_digest
from featureflock.methods import METHODS, FeatureWGD, Method
from featureflock.models import MODELS, MLPConfig, ModelConfig
from featureflock.utils import serialization
from featureflock.utils.registry import PLUGINS

Precision = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["steps", "one-cycle"]


ComponentJSON = TypedDict("ComponentJSON", {"class": str})
"""A component in JSON: the name of its class, and its fields."""


class RecipeJSON(TypedDict):
    """What is read from a recipe in JSON without its components, which may not be registered."""

    data: ComponentJSON
    model: ComponentJSON
    method: ComponentJSON
    members: int | None
    validation: int
    split_seed: int
    seed: int
    precision: str


class UnregisteredComponentError(ValueError):
    """A recipe in JSON names a component that is in no registry."""


@dataclass(frozen=True)
class Recipe:
    """Data, model, method and optimiser settings of a training run.

    The optimiser is SGD with momentum. The learning rate after e of E epochs, with η₀ = learning_rate and w = warmup:

        steps        η₀ · decay_ratio^(number of decay epochs ≤ e)
        one-cycle    η₀ · min(s/w, (1 − s)/(1 − w)),  s = e/E        linear up to η₀, then linear down to 0

    A step uses the learning rate of its midpoint: step b of the B steps of epoch e is at e + (b + ½)/B.
    """

    data: DataSet = Digits()
    """Data set."""
    model: ModelConfig = MLPConfig()
    """Network of each member, without its last linear layer."""
    method: Method = FeatureWGD()
    """Ensemble method."""
    members: int | None = None
    """Number of members; None for the method's default: 10, or 1 for single networks."""
    epochs: int = 60
    """Number of passes over the training set."""
    batch: int = 128
    """Batch size. The last batch of an epoch may be smaller."""
    learning_rate: float = 0.1
    """Initial learning rate; with one-cycle, the maximum."""
    schedule: Schedule = "steps"
    """Learning rate schedule: step decay at decay_epochs, or one linear rise and fall."""
    warmup: float = 0.2
    """Fraction of the training steps in which the learning rate rises; for the one-cycle schedule only."""
    decay_epochs: tuple[int, ...] = ()
    """Epochs, counted from 0, at the start of which the learning rate is multiplied by decay_ratio."""
    decay_ratio: float = 0.1
    """Factor that multiplies the learning rate at each decay."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: float = 5e-4
    """λ of the penalty (λ/2) ‖w‖² on all weights."""
    subset: int | None = None
    """Number of training examples to use, balanced over classes; None for all."""
    validation: int = 0
    """Number of examples, balanced over classes, for validation after each epoch. They are held out of the training
    set, unless the data set provides validation examples."""
    split_seed: int = 0
    """Seed of the validation split and the subset."""
    seed: int = 0
    """Seed of everything else: initial weights, data order, augmentation, dropout."""
    precision: Precision = "auto"
    """Precision of the networks: float32, or bfloat16 with float32 weights (autocast); auto: the fastest."""

    def __post_init__(self) -> None:
        def check(valid: bool, rule: str, *names: str) -> None:
            if not valid:
                raise ValueError(f"{rule}; got {' and '.join(str(getattr(self, name)) for name in names)}.")

        for name in ("epochs", "batch"):
            check(getattr(self, name) >= 1, f"{name} must be at least 1", name)
        for name in ("learning_rate", "decay_ratio"):
            check(0 < getattr(self, name) < math.inf, f"{name} must be a positive finite number", name)
        check(0 <= self.weight_decay < math.inf, "weight_decay must be a finite number of at least 0", "weight_decay")
        check(0 <= self.momentum < 1, "momentum must be at least 0 and below 1", "momentum")
        check(self.momentum > 0 or not self.nesterov, "Nesterov needs a momentum above 0, or --no-nesterov", "momentum")
        increasing = list(self.decay_epochs) == sorted({e for e in self.decay_epochs if e >= 1})
        check(increasing, "decay_epochs must be increasing and at least 1, such as 150 225", "decay_epochs")
        check(self.schedule in get_args(Schedule), 'schedule must be "steps" or "one-cycle"', "schedule")
        check(0 <= self.warmup < 1, "warmup must be at least 0 and below 1, a fraction of the steps", "warmup")
        one_cycle = self.schedule == "one-cycle"
        check(not one_cycle or not self.decay_epochs, "A one-cycle schedule takes no decay_epochs", "decay_epochs")
        check(self.members is None or 1 <= self.members <= 1000, "members must be 1 to 1,000", "members")
        for name in ("seed", "split_seed"):
            check(0 <= getattr(self, name) < 4_000_000, f"{name} must be 0 to 3,999,999", name)
        check(self.validation >= 0, "validation must be at least 0", "validation")
        check(self.subset is None or self.subset >= 1, "subset must be at least 1", "subset")

    @property
    def size(self) -> int:
        """Number of members: `members`, or the method's default."""
        return self.method.default_members if self.members is None else self.members

    def splits(self) -> Splits:
        """Load the data set, split into training, validation and test examples."""
        splits = self.data.load()
        if not isinstance(splits, Splits):
            raise ValueError(f"{type(self.data).__name__}.load must return Splits; got {type(splits).__name__}.")
        splits = splits.split(validation=self.validation, subset=self.subset, seed=self.split_seed)
        return replace(splits, task=splits.task.fitted(splits.train.labels))

    def learning_rate_at(self, epoch: float) -> float:
        """Learning rate after a number of epochs, which may be fractional."""
        if self.schedule == "steps":
            return self.learning_rate * self.decay_ratio ** sum(e <= epoch for e in self.decay_epochs)
        done = epoch / self.epochs
        if done < self.warmup:
            return self.learning_rate * done / self.warmup
        return self.learning_rate * (1 - done) / (1 - self.warmup)

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON types, with the class name of each component.

        Tensors are replaced by their digest and functions by their name, which `from_json` cannot read.
        """
        return cast(dict[str, Any], serialization.to_json(self, fallback=_identify))

    @classmethod
    def from_json(cls, value: Any) -> "Recipe":
        """The recipe that `to_json` wrote. Its components must be registered."""
        return cast(Recipe, serialization.from_json(cls, value, _find_component, "the recipe"))


def data_set_from_json(value: Any) -> DataSet:
    """The data set of a recipe in JSON, without its other components."""
    return cast(DataSet, serialization.from_json(DataSet, value, _find_component, "the data set of the recipe"))


_FREE = ("folder", "workers")
"""Fields that may change when a run is resumed. The digest of the data shows whether the data are the same."""


def recipe_differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Fields in which two values of `Recipe.to_json` differ, such as "seed is 1 instead of 0"."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.get("class") == theirs.get("class"):
        differences = []
        for key in (key for key in {**ours, **theirs} if key not in _FREE):
            differences += recipe_differences(ours.get(key), theirs.get(key), f"{name}.{key}".removeprefix("."))
        return differences
    if ours == theirs:
        return []
    a, b = (value.get("class", value) if isinstance(value, dict) else json.dumps(value) for value in (ours, theirs))
    return [f"{name} is {a} instead of {b}"]


def _identify(value: Any) -> Any:
    """Digest of an array, or qualified name of anything else that JSON has no type for."""
    if isinstance(value, Tensor | np.ndarray):
        return {"shape": list(value.shape), "sha256": content_digest(torch.as_tensor(value))}
    named = value if isinstance(value, type | FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _find_component(name: str) -> type:
    registries = (DATA_SETS, MODELS, METHODS, PRIORS, KERNELS, RULES)
    found = [component for registry in registries for component in registry.values() if component.__name__ == name]
    if len(found) > 1:
        raise ValueError(f"Two registered components have the class name {name}; rename one of the classes.")
    if found:
        return cast(type, found[0])
    raise UnregisteredComponentError(
        f"The recipe's component {name} is not registered; register it in a module named in {PLUGINS}."
    )
