"""Data sets as a recipe names them: frozen dataclasses that load their examples."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from featureflock.data.examples import Examples, Scale, TensorExamples, take, unit_scale
from featureflock.data.image_files import read_tree
from featureflock.data.rng import permutation
from featureflock.data.sets.two_view_digits import two_view_digits
from featureflock.data.sources.cache import load
from featureflock.data.sources.class_names import DIGITS
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.data.streaming import from_dataset
from featureflock.data.views import View

_VALIDATION, _SUBSET = 1, 2
"""Which random numbers are for what."""


@dataclass(frozen=True)
class Splits:
    """What to train on, what to look at meanwhile, and what to be judged by."""

    train: Examples
    test: Examples
    classes: int
    validation: Examples | None = None
    names: tuple[str, ...] = ()
    """Of the classes, where they have any."""
    views: tuple[View, ...] = ()
    """Parts of the inputs each of which tells the class, where there are such."""

    def divided(self, *, validation: int = 0, subset: int | None = None, seed: int = 0) -> "Splits":
        """With `validation` examples held out of the training set, and of the rest only `subset` kept.

        Both have as many examples of each class as there are to be had; which ones is drawn by the seed.
        """
        train, held_out = self.train, self.validation
        if not 0 <= validation < len(train):
            raise ValueError(f"validation must leave something to train on: 0 to {len(train) - 1}; got {validation}.")
        if validation:
            positions, rest = take(train, validation, seed, _VALIDATION)
            train, held_out = train.select(rest), train.select(positions)
        if subset is not None:
            if not 1 <= subset <= len(train):
                raise ValueError(f"subset must be 1 to {len(train)}, the training examples there are; got {subset}.")
            train = train.select(take(train, subset, seed, _SUBSET)[0])
        return replace(self, train=train, validation=held_out)


class DataSet(ABC):
    """A data set of your own says how to load it."""

    @abstractmethod
    def load(self) -> Splits:
        """All of it."""


@dataclass(frozen=True)
class Digits(DataSet):
    """The 1,797 scans of handwritten digits that come with scikit-learn: nothing to download."""

    views: Literal[1, 2] = 1
    """1: single scans, 8 × 8 (1,200 to train on). 2: two scans of one digit side by side, 8 × 16."""

    def load(self) -> Splits:
        if self.views == 2:
            pairs = two_view_digits()
            x_train, x_test = ((16 * x).to(torch.uint8)[:, None] for x in (pairs.x_train, pairs.x_test["clean"]))
            halves = (View("left", slice(0, 8), slice(0, 8)), View("right", slice(0, 8), slice(8, 16)))
            return replace(_digits(x_train, pairs.y_train, x_test, pairs.y_test), views=halves)
        from sklearn.datasets import load_digits  # takes a second, which other data need not wait for

        images, labels = load_digits(return_X_y=True)
        order = permutation(len(labels), 0)
        x, y = torch.from_numpy(images).to(torch.uint8).view(-1, 1, 8, 8)[order], torch.from_numpy(labels)[order]
        return _digits(x[:1200], y[:1200], x[1200:], y[1200:])


def _digits(x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor) -> Splits:
    scale = Scale((0.0,), (16.0,))
    train, test = (TensorExamples(x, y, scale=scale, white=16) for x, y in ((x_train, y_train), (x_test, y_test)))
    return Splits(train, test, 10, names=DIGITS)


@dataclass(frozen=True)
class HeldOut(DataSet):
    """The training set of another data set, a part of which stands in for the test set.

    For choosing settings: what is trained and measured on it has never seen the real test set.
    """

    data: DataSet = Digits()
    """The data set whose test set is left alone."""
    examples: int = 200
    """How many training examples are tested on instead, as many of each class."""
    seed: int = 0
    """Draws them."""

    def load(self) -> Splits:
        splits = self.data.load().divided(validation=self.examples, seed=self.seed)
        if splits.validation is None:
            raise ValueError(f"HeldOut needs at least 1 example to test on; got {self.examples}.")
        return replace(splits, test=splits.validation, validation=None)


@dataclass(frozen=True)
class _Downloaded(DataSet):
    """A published data set of small pictures from the cache."""

    cached: ClassVar[str]
    scale: ClassVar[Scale]

    padding: int = 4
    """Random crop in training: how many black pixels are added on each side before; 0 for none."""
    flip: bool = True
    """Random horizontal flip in training."""

    def load(self) -> Splits:
        arrays = load(self.cached)
        train = TensorExamples(arrays.train_x, arrays.train_y, scale=self.scale, padding=self.padding, flip=self.flip)
        facts = PUBLISHED_SETS[self.cached]
        return Splits(
            train,
            TensorExamples(arrays.test_x, arrays.test_y, scale=self.scale),
            facts.classes,
            names=facts.class_names,
        )


@dataclass(frozen=True)
class CIFAR10(_Downloaded):
    """50,000 + 10,000 colour pictures of 32 × 32 in 10 classes. `featureflock data get cifar10` brings them."""

    cached = "cifar10"
    scale = unit_scale((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784))


@dataclass(frozen=True)
class CIFAR100(_Downloaded):
    """50,000 + 10,000 colour pictures of 32 × 32 in 100 classes. `featureflock data get cifar100` brings them."""

    cached = "cifar100"
    scale = unit_scale((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@dataclass(frozen=True)
class MNIST(_Downloaded):
    """60,000 + 10,000 handwritten digits of 28 × 28. `featureflock data get mnist` brings them."""

    cached = "mnist"
    scale = unit_scale((0.1307,), (0.3081,))

    padding: int = 0
    flip: bool = False


@dataclass(frozen=True)
class FashionMNIST(_Downloaded):
    """60,000 + 10,000 pictures of clothes, 28 × 28. `featureflock data get fashion-mnist` brings them."""

    cached = "fashion-mnist"
    scale = unit_scale((0.2860,), (0.3530,))

    padding: int = 2


@dataclass(frozen=True)
class ImageFolder(DataSet):
    """Pictures of any size in a folder for each class, train/<class>/ and val/<class>/: ImageNet, for one."""

    folder: Path = Path("imagenet")
    """Where train/ and val/ are."""
    size: int = 224
    """Pixels on each side of what the network sees."""
    workers: int | None = None
    """Processes that decode pictures; by default one for each core but one."""

    def __post_init__(self) -> None:
        if self.size < 1 or (self.workers is not None and self.workers < 0):
            raise ValueError(f"ImageFolder needs a positive size and no negative workers; got {self}.")

    def load(self) -> Splits:
        workers = max(1, (cpu_count() or 1) - 1) if self.workers is None else self.workers
        train, test, names = read_tree(self.folder, size=self.size, workers=workers)
        return Splits(train, test, len(names), names=tuple(names))


@dataclass(frozen=True, eq=False)
class CustomData(DataSet):
    """Data of your own: for each part a pair (inputs, labels) of tensors or NumPy arrays, a torch Dataset of such
    pairs, or `Examples`.

    Floating-point numbers become float32. Pictures as bytes (N, C, H, W) in uint8 are normalised by the mean and
    deviation of the training pictures; bytes of a Dataset become numbers from 0 to 1.
    """

    train: Any
    test: Any
    padding: int = 0
    """Random crop of pictures in training: how many black pixels are added on each side before."""
    flip: bool = False
    """Random horizontal flip of pictures in training."""
    workers: int = 0
    """Processes that read a torch Dataset."""

    def load(self) -> Splits:
        if not _is_pair(self.train) and (self.padding or self.flip):
            raise ValueError("padding and flip are for pairs of tensors; a Dataset augments by its own transforms.")
        scale = _scale(torch.as_tensor(self.train[0])) if _is_pair(self.train) else None
        train = self._examples(self.train, scale, self.padding, self.flip)
        test = self._examples(self.test, scale, 0, False)
        if not len(train) or not len(test):
            raise ValueError(
                f"There must be examples in both parts; got {len(train)} to train on, {len(test)} to test."
            )
        classes = 1 + int(torch.cat([train.labels, test.labels]).max())
        return Splits(train, test, classes)

    def _examples(self, own: Any, scale: Scale | None, padding: int, flip: bool) -> Examples:
        if isinstance(own, Examples):
            return own
        if _is_pair(own):
            x, y = (torch.as_tensor(part) for part in own)
            return TensorExamples(x.float() if x.is_floating_point() else x, y, scale=scale, padding=padding, flip=flip)
        if isinstance(own, IterableDataset) or (hasattr(own, "__getitem__") and hasattr(own, "__len__")):
            return from_dataset(own, workers=self.workers)
        raise TypeError(f"Data are a pair (inputs, labels), a torch Dataset, or Examples; got {type(own).__name__}.")


def _is_pair(own: Any) -> bool:
    return isinstance(own, tuple | list) and len(own) == 2


def _scale(x: Tensor) -> Scale | None:
    """Mean and deviation of each channel of pictures in bytes; None for other inputs."""
    if x.dtype != torch.uint8 or x.ndim != 4 or not len(x):
        return None
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(1)]).double()
    share = counts / counts.sum(1, keepdim=True)
    level = torch.arange(256, dtype=torch.float64, device=x.device)
    mean = share @ level
    variance = share @ level.square() - mean.square()
    return Scale(tuple(mean.tolist()), tuple(math.sqrt(max(v, 1.0)) for v in variance.tolist()))
