"""Examples that worker processes read while the loop computes: picture files, or a torch Dataset.

An example that cannot be read is named and left out of its batch; only when that becomes the rule does it stop the run.
"""

import random
import signal
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from featureflock.data.augment import EpochKey
from featureflock.data.examples import Batch, Examples, Scale, as_numbers, checked_labels, content_digest
from featureflock.data.rng import random_bits

_Key = tuple[int, int, EpochKey | None]
_TOLERATED = 100
"""So many unreadable examples in a pass are tolerated, or one in a hundred if that is more."""


class ExampleReader(ABC):
    """Reads one example. Worker processes get a copy of it."""

    @abstractmethod
    def read(self, index: int, draw: EpochKey | None) -> Tensor:
        """Input number `index`, augmented by `draw` if that is given; any exception means that it cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call it in a message."""

    @abstractmethod
    def digest(self) -> str:
        """What tells whether two readers read the same, wherever that lies."""

    def identity(self) -> str:
        """What tells whether it reads the same as before; by default nothing does, so that nothing is taken for it."""
        return uuid.uuid4().hex


class StreamedExamples(Examples):
    """Inputs that a reader reads, `workers` processes at a time (0 for this one)."""

    def __init__(self, reader: ExampleReader, labels: Tensor, *, scale: Scale | None = None, workers: int = 0) -> None:
        self.reader, self.scale, self.workers = reader, scale, workers
        self.labels, self.indices = checked_labels(labels, len(labels)), torch.arange(len(labels))
        self._shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self._shape is None:
            problem: Exception | None = None
            for index in self.indices[:_TOLERATED].tolist():
                try:
                    self._shape = tuple(self.reader.read(index, None).shape)
                    break
                except Exception as error:
                    problem = error
            else:
                raise ValueError(f"None of the first examples can be read: {problem}.")
        return self._shape

    def select(self, positions: Tensor) -> Self:
        chosen = object.__new__(type(self))
        vars(chosen).update(vars(self))
        chosen.labels, chosen.indices = self.labels[positions], self.indices[positions]
        return chosen

    def batches(self, order: Sequence[Tensor], device: torch.device, draw: EpochKey | None = None) -> Iterator[Batch]:
        chosen = ((self.indices[positions].tolist(), self.labels[positions].tolist()) for positions in order)
        keys = [[(index, label, draw) for index, label in zip(*pair, strict=True)] for pair in chosen]
        loader: DataLoader[Any] = DataLoader(
            _Items(self.reader),
            batch_sampler=keys,
            collate_fn=_collate,
            num_workers=self.workers,
            worker_init_fn=_ignore_signals,
            pin_memory=device.type == "cuda",
        )
        lost, tolerated = 0, max(_TOLERATED, len(self) // 100)
        for batch in loader:
            lost += len(batch.unreadable)
            if lost > tolerated:
                raise OSError(
                    f"More than {tolerated} of {len(self)} examples cannot be read, the last being "
                    f"{batch.unreadable[-1]}; see whether the disk is still there."
                )
            x, y = batch.x.to(device, non_blocking=True), batch.y.to(device, non_blocking=True)
            yield Batch(as_numbers(x, self.scale) if len(x) else x, y, batch.unreadable)

    def digest(self) -> str:
        return self.reader.digest()

    def identity(self) -> str:
        return f"{self.reader.identity()} {content_digest(self.labels, self.indices)} {self.scale}"


def from_dataset(dataset: Dataset[Any], labels: Tensor | None = None, *, workers: int = 0) -> StreamedExamples:
    """Examples of a torch Dataset of (input, label) pairs, with whatever transforms it has.

    Python's, NumPy's and PyTorch's random numbers are set for each item by (seed, epoch, index), so that random
    transforms repeat themselves exactly. Without `labels`, the whole data set is read once to learn them; items that
    cannot be read are then left out for good. Inputs are tensors, or pictures and arrays, which become tensors.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError("An IterableDataset cannot be read by index, as resuming needs; give a Dataset with len().")
    reader = _FromDataset(dataset)
    if labels is not None:
        return StreamedExamples(reader, labels, workers=workers)
    items: list[int | str] = list(
        DataLoader(_Labels(dataset), batch_size=None, num_workers=workers, worker_init_fn=_ignore_signals)
    )
    readable = torch.tensor([i for i, item in enumerate(items) if isinstance(item, int)], dtype=torch.int64)
    lost = [item for item in items if isinstance(item, str)]
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(items)} items cannot be read and are left out, first {lost[0]}.", stacklevel=2
        )
    labels = torch.tensor([item if isinstance(item, int) else 0 for item in items], dtype=torch.int64)
    return StreamedExamples(reader, labels, workers=workers).select(readable)


@dataclass(frozen=True)
class _FromDataset(ExampleReader):
    dataset: Dataset[Any]

    def read(self, index: int, draw: EpochKey | None) -> Tensor:
        bits = int(random_bits(*((0, 0) if draw is None else (draw.seed, draw.epoch + 1)), index))
        torch.manual_seed(bits)
        random.seed(bits)
        np.random.seed(bits)  # noqa: NPY002 — it is what a user's transforms may draw from
        return _as_tensor(self.dataset[index][0])

    def name(self, index: int) -> str:
        return f"item {index}"

    def digest(self) -> str:
        return f"{type(self.dataset).__qualname__} of {len(self.dataset)}"  # type: ignore[arg-type]


def _as_tensor(x: Any) -> Tensor:
    if isinstance(x, Image):
        array = np.array(x)
        return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
    tensor = torch.as_tensor(x)
    return tensor.float() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class _Labels(Dataset[int | str]):
    dataset: Dataset[Any]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> int | str:
        try:
            return int(self.dataset[index][1])
        except Exception as error:
            return f"item {index} ({error})"


@dataclass(frozen=True)
class _Items(Dataset[Any]):
    reader: ExampleReader

    def __getitem__(self, key: _Key) -> tuple[Tensor, int] | str:
        index, label, draw = key
        try:
            return self.reader.read(index, draw), label
        except Exception as error:
            return f"{self.reader.name(index)} ({error})"


def _collate(items: list[tuple[Tensor, int] | str]) -> Batch:
    read = [item for item in items if not isinstance(item, str)]
    x = torch.stack([x for x, _ in read]) if read else torch.empty(0)
    y = torch.tensor([label for _, label in read], dtype=torch.int64)
    return Batch(x, y, tuple(item for item in items if isinstance(item, str)))


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM often go to a whole group of processes. They are for the loop, which then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
