"""Labelled examples that a training loop reads in batches, by position.

`TensorExamples` holds all inputs in memory: images stay uint8, and a batch is gathered, augmented and normalised as a
whole on the device. `StreamedExamples` reads single examples in worker processes: image files, or any torch Dataset.
Every example has an index in the full training set, so its augmentation does not depend on the subset used.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from featureflock.data.augment import EpochKey, crop_and_flip
from featureflock.data.rng import permutation
from featureflock.distributed.mesh import Axis
from featureflock.tasks import Classification, Task


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    unreadable: tuple[str, ...] = ()
    """Name and error of each example that could not be read and is missing from the batch."""


class Examples(ABC):
    """Labels or other targets (N, …), and indices (N,) into the full set, on the CPU; inputs are read as batches."""

    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one input: (C, H, W) for images."""

    def select(self, positions: Tensor) -> Self:
        """Return only the examples at these positions."""
        chosen = copy.copy(self)
        chosen.labels, chosen.indices = self.labels[positions], self.indices[positions]
        return chosen

    def read_by(self, row: Axis) -> Self:
        """Return examples whose reading is divided among processes that ask for the same batches, in the same order."""
        return self

    @abstractmethod
    def batches(self, order: Sequence[Tensor], device: torch.device, key: EpochKey | None = None) -> Iterator[Batch]:
        """Yield one batch for each tensor of positions, augmented if `key` is given."""

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of the content, equal for equal examples on any machine."""

    def identity(self) -> str:
        """Return a digest of exactly what a network sees, normalisation included: the key of cached predictions."""
        return self.digest()


@dataclass(frozen=True)
class Normalisation:
    """(x − mean) / std for each channel, in the units of x.

    `mean` and `std` have one number for each of C channels. With k · C numbers the image is divided into k parts of
    equal height, listed from top to bottom, each with its own C numbers.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def for_bytes(cls, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Normalise uint8 images by the published mean and std of pixels in [0, 1]."""
        return cls(tuple(255 * m for m in mean), tuple(255 * s for s in std))

    def __call__(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        mean, std = (_broadcastable(v, shape).to(x.device, non_blocking=True) for v in (self.mean, self.std))
        factor = 1 / std
        return x.float().mul(factor).sub_(mean * factor)

    def mean_input(self, shape: tuple[int, ...]) -> Tensor:
        """Return the input (C, …) that is normalised to zeros."""
        return _broadcastable(self.mean, shape).expand(shape)

    def above(self, other: "Normalisation") -> "Normalisation":
        """Return the normalisation of images whose upper half uses this one and whose lower half uses `other`."""
        return Normalisation((*self.mean, *other.mean), (*self.std, *other.std))


def _broadcastable(values: tuple[float, ...], shape: tuple[int, ...]) -> Tensor:
    """Arrange values as (C, 1, …), or as (C, H, 1) if parts of the image differ."""
    channels, *size = shape
    parts = len(values) // channels if size else 1
    if parts <= 1:
        return torch.tensor(values).view(-1, *(1,) * len(size))
    if parts * channels != len(values) or size[0] % parts:
        raise ValueError(f"A normalisation of {len(values)} numbers does not fit inputs of shape {shape}.")
    return torch.tensor(values).view(parts, channels).T.repeat_interleave(size[0] // parts, 1)[..., None]


def normalise(x: Tensor, normalisation: Normalisation | None) -> Tensor:
    """Convert a batch to network inputs; without a normalisation, bytes are scaled to [0, 1] and floats unchanged."""
    if normalisation is not None:
        return normalisation(x)
    return x.float() / 255 if x.dtype == torch.uint8 else x


class TensorExamples(Examples):
    """Examples with all inputs in one tensor (N, …).

    Args:
        x, y: inputs, and integer labels (N,) or the targets (N, …) of another task.
        task: the likelihood of the targets.
        normalisation: applied after augmentation, see `normalise`.
        padding, flip: augmentation of images (N, C, H, W) in training, as in `crop_and_flip`; 0 and False for none.
        white: the byte value of white, needed to display or corrupt images.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        normalisation: Normalisation | None = None,
        padding: int = 0,
        flip: bool = False,
        white: int = 255,
        task: Task = Classification(),
    ) -> None:
        self.x, self.labels, self.indices = x, task_targets(y, len(x), task), torch.arange(len(x))
        self.normalisation, self.padding, self.flip, self.white = normalisation, padding, flip, white
        if (padding or flip) and x.ndim != 4:
            raise ValueError(f"Crops and flips need images (N, C, H, W); got inputs of shape {tuple(x.shape)}.")
        if not 0 <= padding <= (largest := max(x.shape[2:], default=0)):
            raise ValueError(f"padding must be 0 to {largest} pixels, the size of the images; got {padding}.")
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise ValueError("Some inputs are NaN or infinite; remove or repair them before training.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def select(self, positions: Tensor) -> Self:
        chosen = super().select(positions)
        chosen.x = self.x[positions]
        return chosen

    def batches(self, order: Sequence[Tensor], device: torch.device, key: EpochKey | None = None) -> Iterator[Batch]:
        self.x = self.x.to(device)  # everything at once: CIFAR's bytes take 150 MB
        for positions in order:
            x = self.x[positions.to(device, non_blocking=True)]
            if key is not None and (self.padding or self.flip):
                x = crop_and_flip(x, self.indices[positions], key, padding=self.padding, flip=self.flip)
            yield Batch(normalise(x, self.normalisation), self.labels[positions].to(device, non_blocking=True))

    def digest(self) -> str:
        return content_digest(self.x, self.labels)

    def identity(self) -> str:
        return f"{self.digest()} {self.normalisation}"


class View(NamedTuple):
    """A named rectangle of an image that suffices to predict the class."""

    name: str
    rows: slice
    columns: slice


def only_view(examples: TensorExamples, view: View) -> TensorExamples:
    """Return images (N, C, H, W) that have the mean training input outside one view: zeros after normalisation.

    Not black, which is far from the mean of photographs and would be a second change besides the missing view. Images
    in bytes get the bytes nearest to the mean.
    """
    normalisation, shape = examples.normalisation, examples.shape
    blank = torch.zeros(shape) if normalisation is None else normalisation.mean_input(shape)
    if not examples.x.is_floating_point():
        blank = blank.round()
    x = blank.to(examples.x).expand_as(examples.x).contiguous()
    x[:, :, view.rows, view.columns] = examples.x[:, :, view.rows, view.columns]
    return TensorExamples(x, examples.labels, normalisation=normalisation, white=examples.white)


def task_targets(y: Tensor, count: int, task: Task) -> Tensor:
    """Return `count` targets of a task on the CPU: class indices in int64, others in float32."""
    if task.kind == Classification.kind and y.ndim == 1:
        return class_labels(y, count)
    if len(y) != count:
        raise ValueError(f"There are {count} inputs but {len(y)} targets.")
    if task.kind != Classification.kind:
        return y.detach().cpu().float()
    if y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"Classification needs integer class indices as targets; got {y.dtype}.")
    smallest = int(y[y != task.ignore_index].min()) if y.numel() else 0  # type: ignore[attr-defined]
    if smallest < 0:
        raise ValueError(f"Targets must be class indices from 0; the smallest is {smallest}.")
    return y.detach().cpu().long()


def class_labels(y: Tensor, count: int) -> Tensor:
    """Return `count` class labels as int64 on the CPU, or raise ValueError if they are not class labels."""
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"Labels must be integers of shape (N,); got {y.dtype} of shape {tuple(y.shape)}.")
    if len(y) != count:
        raise ValueError(f"There are {count} inputs but {len(y)} labels.")
    if count and int(y.min()) < 0:
        raise ValueError(f"Labels must be class numbers from 0; the smallest is {int(y.min())}.")
    return y.detach().cpu().long()


def content_digest(*tensors: Tensor) -> str:
    """SHA-256 of dtype, shape and values, independent of the memory layout."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def stratified_split(examples: Examples, count: int, *keys: int) -> tuple[Tensor, Tensor]:
    """Positions of `count` examples, balanced over classes, and of the remaining ones; both sorted.

    The examples of each class are ranked at random by the keys, and the lowest ranks of all classes are chosen. Without
    exactly one class per example, all are ranked together.
    """
    shuffled = permutation(len(examples), *keys)
    if examples.labels.ndim > 1 or examples.labels.is_floating_point():
        return shuffled[:count].sort().values, shuffled[count:].sort().values
    labels = examples.labels[shuffled]
    by_class = labels.argsort(stable=True)
    sizes = torch.bincount(labels)
    rank = torch.empty_like(by_class)
    rank[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    chosen = shuffled[rank.argsort(stable=True)]
    return chosen[:count].sort().values, chosen[count:].sort().values
