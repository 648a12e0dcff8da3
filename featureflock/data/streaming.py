"""Examples that worker processes read while the training loop computes: image files, or a torch Dataset.

An example that cannot be read is reported and left out of its batch. Too many of them stop the run.

Processes along the members axis of a mesh need the same batches. Each of M reads 1/M of a batch, and the parts are
gathered as they were read, as bytes for images: so every file is decoded once, not M times.
"""

import copy
import math
import random
import signal
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from featureflock.data.augment import EpochKey
from featureflock.data.examples import Batch, Examples, Normalisation, content_digest, normalise, task_targets
from featureflock.data.rng import random_bits
from featureflock.distributed.mesh import Axis
from featureflock.tasks import Classification, Task

_MAX_WORKERS = 1024
_MAX_UNREADABLE = 100
"""Unreadable examples tolerated in one pass; 1 % of the examples if that is more."""


def check_workers(workers: int) -> None:
    """Raise ValueError for a negative or an absurd number of processes."""
    if workers < 0:
        raise ValueError(f"workers must be at least 0; got {workers}.")
    if workers > _MAX_WORKERS:
        raise ValueError(f"workers must be at most {_MAX_WORKERS:,} processes; got {workers:,}.")


class ExampleReader(ABC):
    """Reads single examples. It is pickled and sent to worker processes."""

    @abstractmethod
    def read(self, index: int, key: EpochKey | None) -> Tensor:
        """Return input `index`, augmented if `key` is given. Any exception marks the example as unreadable."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an example for messages."""

    @abstractmethod
    def digest(self) -> str:
        """Return a digest, equal for readers of the same data on any machine."""

    def identity(self) -> str:
        """Return a digest of exactly what is read; by default unique, so predictions are never taken from a cache."""
        return uuid.uuid4().hex


class StreamedExamples(Examples):
    """Examples read by an `ExampleReader` in `workers` processes (0: in this process)."""

    def __init__(
        self,
        reader: ExampleReader,
        labels: Tensor,
        *,
        normalisation: Normalisation | None = None,
        workers: int = 0,
        task: Task = Classification(),
    ) -> None:
        check_workers(workers)
        self.reader, self.normalisation, self.workers, self.row = reader, normalisation, workers, Axis()
        self.labels, self.indices = task_targets(labels, len(labels), task), torch.arange(len(labels))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        problem = "there are none"
        for index in self.indices[:_MAX_UNREADABLE].tolist():
            try:
                return tuple(self.reader.read(index, None).shape)
            except Exception as error:
                problem = str(error)
        raise ValueError(f"None of the first examples can be read: {problem}.")

    def read_by(self, row: Axis) -> Self:
        shared = copy.copy(self)
        shared.row = row
        return shared

    def batches(self, order: Sequence[Tensor], device: torch.device, key: EpochKey | None = None) -> Iterator[Batch]:
        parts = [positions[self.row.local_slice(len(positions))] for positions in order]
        loader: DataLoader[Any] = DataLoader(
            _Items(self.reader.read, self.reader.name),
            batch_sampler=[[(index, key) for index in self.indices[part].tolist()] for part in parts],
            collate_fn=_collate,
            num_workers=self.workers,
            worker_init_fn=_ignore_signals,
            pin_memory=device.type == "cuda",
        )
        count, limit = 0, max(_MAX_UNREADABLE, len(self) // 100)
        for positions, read in zip(order, _start(loader), strict=True):
            x, readable, unreadable = _of_the_row(self.row, len(positions), device, *read)
            count += len(unreadable)
            if count > limit:
                raise OSError(
                    f"More than {limit} of {len(self)} examples cannot be read, the last being {unreadable[-1]}; check "
                    "that the disk is still mounted."
                )
            y = self.labels[positions][readable].to(device, non_blocking=True)
            yield Batch(normalise(x, self.normalisation) if len(x) else x, y, unreadable)

    def digest(self) -> str:
        return self.reader.digest()

    def identity(self) -> str:
        return f"{self.reader.identity()} {content_digest(self.labels, self.indices)} {self.normalisation}"


def from_dataset(
    dataset: Dataset[Any], labels: Tensor | None = None, *, workers: int = 0, task: Task = Classification()
) -> StreamedExamples:
    """Examples from a torch Dataset of (input, target) pairs, transforms included.

    The generators of Python, NumPy and PyTorch are seeded for each item by (seed, epoch, index), so random transforms
    are reproducible. Without `labels`, the whole data set is read once to collect them, and items that cannot be read
    are dropped with a warning. Inputs are tensors, PIL images or arrays.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError("An IterableDataset has no indices, which resuming needs; use a Dataset with len().")
    check_workers(workers)
    reader = _FromDataset(dataset)
    if labels is not None:
        return StreamedExamples(reader, labels, workers=workers, task=task)
    keys = [(index,) for index in range(len(dataset))]  # type: ignore[arg-type]
    source = _Items(reader.label, reader.name)
    items: list[Tensor | str] = list(
        DataLoader(source, batch_size=None, sampler=keys, num_workers=workers, worker_init_fn=_ignore_signals)
    )
    readable = torch.tensor([i for i, item in enumerate(items) if not isinstance(item, str)], dtype=torch.int64)
    if unreadable := [item for item in items if isinstance(item, str)]:
        counts = f"{len(unreadable)} of {len(items)} items"
        warnings.warn(f"{counts} cannot be read and are left out; the first is {unreadable[0]}.", stacklevel=2)
    if not len(readable):
        raise ValueError(f"None of the {len(items)} items of the Dataset can be read.")
    blank = torch.zeros_like(next(item for item in items if not isinstance(item, str)))
    labels = torch.stack([blank if isinstance(item, str) else item for item in items])
    return StreamedExamples(reader, labels, workers=workers, task=task).select(readable)


@dataclass(frozen=True)
class _FromDataset(ExampleReader):
    dataset: Dataset[Any]

    def read(self, index: int, key: EpochKey | None) -> Tensor:
        bits = int(random_bits(*((0, 0) if key is None else (key.seed, key.epoch + 1)), index))
        torch.manual_seed(bits)
        random.seed(bits)
        np.random.seed(bits)  # noqa: NPY002 — transforms may use the global generator
        return _as_tensor(self.dataset[index][0])

    def label(self, index: int) -> Tensor:
        return torch.as_tensor(self.dataset[index][1])

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
class _Items(Dataset[Any]):
    """Calls `read` with keys that begin with an index; an item that cannot be read is its name and error."""

    read: Callable[..., Any]
    name: Callable[[int], str]

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        try:
            return self.read(*key)
        except Exception as error:
            name = self.name(key[0])
            return f"{name} ({str(error).replace(name, 'it').rstrip('.')})"


def _collate(items: list[Tensor | str]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    x = [item for item in items if not isinstance(item, str)]
    readable = torch.tensor([not isinstance(item, str) for item in items])
    return torch.stack(x) if x else torch.empty(0), readable, tuple(item for item in items if isinstance(item, str))


def _of_the_row(
    row: Axis, count: int, device: torch.device, x: Tensor, readable: Tensor, unreadable: tuple[str, ...]
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The readable inputs of a batch of `count` examples on the device, of which this process has read its part."""
    x = x.to(device, non_blocking=True)
    if row.size == 1:
        return x, readable, unreadable
    own = (readable.tolist(), unreadable, (tuple(x.shape[1:]), x.dtype) if len(x) else None)
    found: list[Any] = [None] * row.size
    dist.all_gather_object(found, own, group=row.group)
    readable = torch.tensor([each for mask, _, _ in found for each in mask], dtype=torch.bool)
    unreadable = tuple(name for _, names, _ in found for name in names)
    kinds = list(dict.fromkeys(kind for _, _, kind in found if kind is not None))
    if len(kinds) > 1:
        raise ValueError(f"The examples of a batch must have one shape and type; got {kinds[0]} and {kinds[1]}.")
    if not kinds:
        return x, readable, unreadable
    ((shape, dtype),) = kinds
    size = math.prod(shape) * dtype.itemsize
    rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), size)
    if len(x) < len(own[0]):
        rows = rows.new_zeros(len(own[0]), size).index_copy_(0, _positions(torch.tensor(own[0]), device), rows)
    gathered = row.all_gather_rows(rows, count)
    if not readable.all():
        gathered = gathered[_positions(readable, device)]
    return gathered.view(-1).view(dtype).view(-1, *shape), readable, unreadable


def _positions(mask: Tensor, device: torch.device) -> Tensor:
    """Where a mask on the CPU is true; a GPU would have to wait for the result."""
    return mask.nonzero().flatten().to(device, non_blocking=True)


def _start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers with signals blocked: one that arrives before `_ignore_signals` would end a worker."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return iter(loader)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _ignore_signals(worker: int) -> None:
    """Leave Ctrl-C and SIGTERM, which reach the whole process group, to the training loop, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
