"""Custom data: arrays, torch Datasets or Examples."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from featureflock.data.examples import Examples, Normalisation, TensorExamples
from featureflock.data.sets.base import DataSet, Splits
from featureflock.data.streaming import from_dataset
from featureflock.tasks import Classification, Task

_MAX_CLASSES = 10**6


@dataclass(frozen=True, eq=False)
class CustomData(DataSet):
    """Custom data, each part as a pair (inputs, targets) of tensors or arrays, a torch Dataset of pairs, or `Examples`.

    Floating-point inputs become float32. Images (N, C, H, W) in uint8 are normalised by the mean and standard deviation
    of the training images; bytes of a Dataset are scaled to [0, 1]. Not registered in `DATA_SETS`, because a recipe
    file cannot hold the data.
    """

    train: Any
    test: Any
    padding: int = 0
    """Padding of random crops of training images, in pixels on each side; 0 for no crops."""
    flip: bool = False
    """Flip training images horizontally at random."""
    workers: int = 0
    """Processes that read a torch Dataset."""
    task: Task = Classification()  # type: ignore[misc]
    """The likelihood of the targets: `tasks.Regression()` for numbers."""

    def load(self) -> Splits:
        if not _is_pair(self.train) and (self.padding or self.flip):
            raise ValueError("padding and flip are for pairs of tensors; use the transforms of your Dataset instead.")
        normalisation = _channel_statistics(torch.as_tensor(self.train[0])) if _is_pair(self.train) else None
        train = self._examples(self.train, normalisation, self.padding, self.flip)
        test = self._examples(self.test, normalisation, 0, False)
        if not len(train) or not len(test):
            raise ValueError(f"The training and test sets must have examples; got {len(train)} and {len(test)}.")
        return Splits(train, test, classes=self._classes(train.labels, test.labels), task=self.task)

    def _classes(self, train: Tensor, test: Tensor) -> int:
        """Number of classes, labels, or numbers in a target."""
        if self.task.kind != Classification.kind:
            return 1 if train.ndim == 1 else train.shape[1]
        classes = 1 + max(int(y[y != self.task.ignore_index].max()) for y in (train, test))  # type: ignore[attr-defined]
        if classes > _MAX_CLASSES:
            raise ValueError(f"There is a label {classes - 1:,}; number the classes 0, 1, … instead.")
        return classes

    def _examples(self, data: Any, normalisation: Normalisation | None, padding: int, flip: bool) -> Examples:
        if isinstance(data, Examples):
            return data
        if _is_pair(data):
            x, y = (torch.as_tensor(part) for part in data)
            x = x.float() if x.is_floating_point() else x
            if flip or padding:
                self._check_augmentation()
            return TensorExamples(x, y, normalisation=normalisation, padding=padding, flip=flip, task=self.task)
        if isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            return from_dataset(data, workers=self.workers, task=self.task)
        raise ValueError(f"Give a pair (inputs, labels), a torch Dataset or Examples; got {type(data).__name__}.")

    def _check_augmentation(self) -> None:
        if self.task.kind == Classification.kind and torch.as_tensor(self.train[1]).ndim > 1:
            raise ValueError(
                "padding and flip would move pixels but not their classes; augment a torch Dataset instead."
            )


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2


def _channel_statistics(x: Tensor) -> Normalisation | None:
    """Mean and standard deviation of each channel of uint8 images; None for other inputs."""
    if x.dtype != torch.uint8 or x.ndim != 4 or not len(x):
        return None
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(1)]).double()
    frequency, level = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64, device=x.device)
    mean = frequency @ level
    std = (frequency @ level.square() - mean.square()).clamp(min=1).sqrt()
    return Normalisation(tuple(mean.tolist()), tuple(std.tolist()))
