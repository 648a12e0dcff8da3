"""The data set interface, and the registry of data sets.

@DATA_SETS.register("my-data")
@dataclass(frozen=True)
class MyData(DataSet):
    def load(self) -> Splits: ...
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from featureflock.data.examples import Examples, View, stratified_split
from featureflock.data.rng import Stream
from featureflock.tasks import Classification, Task
from featureflock.utils.registry import Registry


@dataclass(frozen=True)
class Splits:
    """Training, test and optional validation examples, and the task."""

    train: Examples
    test: Examples
    classes: int
    """Number of classes; of labels for multi-label data; of numbers in a target for regression."""
    validation: Examples | None = None
    """Held-out examples. A data set that provides them makes them of material that is not in the training set."""
    class_names: tuple[str, ...] = ()
    """One name for each class, or none at all."""
    views: tuple[View, ...] = ()
    """Parts of the inputs each of which suffices to predict the class, if there are any."""
    task: Task = Classification()
    """The likelihood of the targets."""
    feature_names: tuple[str, ...] = ()
    """One name for each column of tabular inputs, or none at all."""

    def __post_init__(self) -> None:
        if self.task.kind != Classification.kind:
            check_targets(self.task, self.classes, *filter(None, (self.train, self.test, self.validation)))
            return
        for part in filter(None, (self.train, self.test, self.validation)):
            if (label := int(part.labels.max())) >= self.classes:
                raise ValueError(f"The labels of {self.classes} classes are 0 to {self.classes - 1}; got {label}.")
        if len(self.class_names) not in (0, self.classes):
            raise ValueError(f"Give a name for each of {self.classes} classes or none; got {len(self.class_names)}.")

    def digests(self) -> dict[str, str]:
        """Digests of the content of each part: train, test and, if there is one, validation."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: part.digest() for name, part in parts.items() if part is not None}

    def split(self, *, validation: int = 0, subset: int | None = None, seed: int = 0) -> "Splits":
        """Hold `validation` examples out of the training set, and train on `subset` of the rest.

        Both are chosen at random by the seed, and balanced over classes where there is one class per example. If the
        data set provides validation examples, `validation` of these are used, and the training set stays whole.
        """
        train, held_out = self.train, None
        own = self.validation
        if own is not None and not 0 <= validation <= len(own):
            raise ValueError(
                f"validation must be 0 to {len(own)}, the validation examples there are; got {validation}."
            )
        if own is None and not 0 <= validation < len(train):
            raise ValueError(f"validation must be 0 to {len(train) - 1}, to leave training examples; got {validation}.")
        if validation and own is not None:
            held_out = own.select(stratified_split(own, validation, seed, Stream.VALIDATION)[0])
        elif validation:
            positions, rest = stratified_split(train, validation, seed, Stream.VALIDATION)
            train, held_out = train.select(rest), train.select(positions)
        if subset is not None:
            if not 1 <= subset <= len(train):
                raise ValueError(f"subset must be 1 to {len(train)}, the number of training examples; got {subset}.")
            train = train.select(stratified_split(train, subset, seed, Stream.SUBSET)[0])
        return replace(self, train=train, validation=held_out)


class DataSet(ABC):
    """A data set as a recipe names it: a frozen dataclass that loads its examples."""

    train_size: ClassVar[int | None] = None
    """Number of training examples, for cost estimates before loading; None for small or unknown data."""
    input_shape: ClassVar[tuple[int, ...] | None] = None
    """Shape of one input, for cost estimates."""
    task: ClassVar[Task] = Classification()
    """The likelihood of the targets. A data set that wraps another, or that is told its task, overrides it."""
    made_from: ClassVar[tuple[str, ...]] = ()
    """Published data sets that its images are composed of; they are not out-of-distribution by default."""

    @abstractmethod
    def load(self) -> Splits:
        """Return the training and test examples."""


def check_seed(name: str, seed: int) -> None:
    """Raise ValueError unless a generator of random numbers takes the seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be at least 0 and below 2^32; got {seed}.")


def check_targets(task: Task, size: int, *parts: Examples) -> None:
    """Raise ValueError unless targets belong to a task of labels or numbers."""
    for part in parts:
        y = part.labels
        columns = 1 if y.ndim == 1 else y.shape[1]
        if columns != size:
            raise ValueError(f"{task.name} has {size} labels or numbers per target; got targets {tuple(y.shape)}.")
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise ValueError("Some targets are NaN or infinite; remove these examples before training.")


DATA_SETS: Registry[type[DataSet]] = Registry("data set")
"""Data sets by the name used in recipes and on the command line."""
