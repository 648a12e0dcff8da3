"""Examples to learn from: inputs with labels, of which a loop asks batches by their positions.

In memory (`InMemory`), pictures stay the bytes that they are, and a batch is cut out, augmented and normalised whole,
on the device. Otherwise (`Streamed`) worker processes read one example at a time: files, or a torch Dataset of one's
own. Every example keeps its index in the whole training set, so that its augmentation does not depend on what else
is used.

Shapes: N examples, B of them in a batch.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from featureflock.data.augment import EpochKey, crop_and_flip
from featureflock.data.rng import permutation


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    unreadable: tuple[str, ...] = ()
    """Examples that could not be read and are missing from the batch, in words."""


class Examples(ABC):
    """Labels (N,) int64 and indices (N,) in the whole set, on the CPU; inputs as batches."""

    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of one input: (C, H, W) for pictures."""

    @abstractmethod
    def select(self, positions: Tensor) -> Self:
        """Only the examples at these positions."""

    @abstractmethod
    def batches(self, order: Sequence[Tensor], device: torch.device, draw: EpochKey | None = None) -> Iterator[Batch]:
        """One batch for each tensor of positions; augmented if `draw` is given."""

    @abstractmethod
    def digest(self) -> str:
        """What tells whether two sets of examples are the same, wherever they lie."""

    def identity(self) -> str:
        """What tells whether a network sees the same numbers and labels as before: stricter than `digest`."""
        return self.digest()


@dataclass(frozen=True)
class Scale:
    """(x − mean) / deviation for each channel, in the units of x.

    One number for each of C channels; or k of them, k · C in all, for pictures of k parts of the same height: first
    those of all channels of the uppermost part.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        mean, deviation = (_spread(v, shape).to(x.device, non_blocking=True) for v in (self.mean, self.deviation))
        factor = 1 / deviation
        return x.float().mul(factor).sub_(mean * factor)

    def zero(self, shape: tuple[int, ...]) -> Tensor:
        """The input (C, …) that becomes all zeros."""
        return _spread(self.mean, shape).expand(shape)

    def above(self, other: "Scale") -> "Scale":
        """For pictures whose upper half is scaled by this one and whose lower half by another."""
        return Scale((*self.mean, *other.mean), (*self.deviation, *other.deviation))


def _spread(values: tuple[float, ...], shape: tuple[int, ...]) -> Tensor:
    """One number for each channel as (C, 1, …), or for each channel and row (C, H, 1), where parts differ."""
    channels, *size = shape
    parts = len(values) // channels if size else 1
    if parts <= 1:
        return torch.tensor(values).view(-1, *(1,) * len(size))
    if parts * channels != len(values) or size[0] % parts:
        raise ValueError(f"A scale of {len(values)} numbers does not fit inputs of shape {shape}.")
    return torch.tensor(values).view(parts, channels).T.repeat_interleave(size[0] // parts, 1)[..., None]


def as_numbers(x: Tensor, scale: Scale | None) -> Tensor:
    """What a network sees of a batch: scaled; without a scale, bytes from 0 to 1 and all else as it is."""
    if scale is not None:
        return scale(x)
    return x.float() / 255 if x.dtype == torch.uint8 else x


def unit_scale(mean: tuple[float, ...], deviation: tuple[float, ...]) -> Scale:
    """For bytes, from a mean and deviation of pixels in [0, 1], as they are published."""
    return Scale(tuple(255 * m for m in mean), tuple(255 * d for d in deviation))


class TensorExamples(Examples):
    """All inputs in one tensor (N, …).

    Args:
        x, y: inputs and integer labels.
        scale: applied to a batch, after augmentation; None: bytes become numbers from 0 to 1, others stay as they are.
        padding, flip: augmentation of pictures (N, C, H, W) in training, as in `crop_and_flip`; 0 and False for none.
        white: the byte that is white, for those who show pictures or corrupt them.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        scale: Scale | None = None,
        padding: int = 0,
        flip: bool = False,
        white: int = 255,
    ) -> None:
        self.x, self.labels, self.indices = x, checked_labels(y, len(x)), torch.arange(len(x))
        self.scale, self.padding, self.flip, self.white = scale, padding, flip, white
        if (padding or flip) and x.ndim != 4:
            raise ValueError(f"Crops and flips need pictures (N, C, H, W); got inputs of shape {tuple(x.shape)}.")
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise ValueError("Some inputs are not finite numbers; remove or repair them before training.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def select(self, positions: Tensor) -> Self:
        chosen = object.__new__(type(self))
        vars(chosen).update(vars(self))
        chosen.x, chosen.labels, chosen.indices = self.x[positions], self.labels[positions], self.indices[positions]
        return chosen

    def batches(self, order: Sequence[Tensor], device: torch.device, draw: EpochKey | None = None) -> Iterator[Batch]:
        # All of it goes to the device at once: CIFAR's bytes take 150 MB there.
        self.x = self.x.to(device)
        for positions in order:
            x = self.x[positions.to(device, non_blocking=True)]
            if draw is not None and (self.padding or self.flip):
                x = crop_and_flip(x, self.indices[positions], draw, padding=self.padding, flip=self.flip)
            yield Batch(as_numbers(x, self.scale), self.labels[positions].to(device, non_blocking=True))

    def digest(self) -> str:
        return content_digest(self.x, self.labels)

    def identity(self) -> str:
        return f"{self.digest()} {self.scale}"


def checked_labels(y: Tensor, count: int) -> Tensor:
    """Labels as int64 on the CPU, or a sentence that says what is wrong with them."""
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"Labels must be integers of shape (N,); got {y.dtype} of shape {tuple(y.shape)}.")
    if len(y) != count:
        raise ValueError(f"There are {count} inputs but {len(y)} labels.")
    if count and int(y.min()) < 0:
        raise ValueError(f"Labels must be class numbers from 0; the smallest is {int(y.min())}.")
    return y.detach().cpu().long()


def content_digest(*tensors: Tensor) -> str:
    """SHA-256 of the numbers, whatever their layout in memory."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def take(examples: Examples, count: int, *keys: int) -> tuple[Tensor, Tensor]:
    """Positions of `count` examples, as many of each class as there are to be had, and of the rest; both in order.

    Drawn by the keys: members of each class are ranked at random, and the lowest ranks of all classes are taken.
    """
    shuffled = permutation(len(examples), *keys)
    labels = examples.labels[shuffled]
    by_class = labels.argsort(stable=True)
    sizes = torch.bincount(labels)
    rank = torch.empty_like(by_class)
    rank[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    chosen = shuffled[rank.argsort(stable=True)]
    return chosen[:count].sort().values, chosen[count:].sort().values
