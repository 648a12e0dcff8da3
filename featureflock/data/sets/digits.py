"""The 1,797 handwritten digits of scikit-learn, single or as two-view digits.

Each image of the two-view digits is two different scans of the *same* digit side by side (8 × 16), so either half
suffices to predict the class: a test of the paper's hypothesis that needs no download. An ensemble whose members use
different views should lose little when one half is blank. Training, validation and test images share no scan.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples, View
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits, check_seed
from featureflock.data.sources.class_names import DIGITS


@DATA_SETS.register("digits")
@dataclass(frozen=True)
class Digits(DataSet):
    """The 1,797 scans of handwritten digits included in scikit-learn; no download needed."""

    views: Literal[1, 2] = 1
    """1: single scans of 8 × 8, 1,200 for training. 2: two scans of the same digit side by side, 8 × 16."""
    seed: int = 0
    """Chooses the scans and pairs of the two-view digits; single scans do not depend on it."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)

    def load(self) -> Splits:
        parts: tuple[tuple[Tensor, Tensor], ...]
        if self.views == 2:
            pairs = two_view_digits(self.seed)
            validation = pairs.x_validation, pairs.y_validation
            parts = (pairs.x_train, pairs.y_train), (pairs.x_test["clean"], pairs.y_test), validation
            views = [View("left", slice(0, 8), slice(0, 8)), View("right", slice(0, 8), slice(8, 16))]
        else:
            x, y = scans()
            order = permutation(len(y), Stream.DIGITS_SPLIT)
            parts, views = ((x[order[:1200]], y[order[:1200]]), (x[order[1200:]], y[order[1200:]])), []
        norm = Normalisation((0.0,), (16.0,))
        images = (((16 * x).to(torch.uint8)[:, None], y) for x, y in parts)
        train, test, *held_out = (TensorExamples(x, y, normalisation=norm, white=16) for x, y in images)
        return Splits(train, test, 10, next(iter(held_out), None), class_names=DIGITS, views=tuple(views))


NOISE = 0.4
"""Standard deviation of the noise in the noisy test set."""


@dataclass(frozen=True)
class TwoViewDigits:
    """Images (N, 8, 16) in [0, 1] and labels (N,)."""

    x_train: Tensor
    y_train: Tensor
    x_test: dict[str, Tensor]
    """The same test images in four versions: "clean", "left blank", "right blank" and "noise"."""
    y_test: Tensor
    x_validation: Tensor
    y_validation: Tensor


def two_view_digits(seed: int = 0, *, train: int = 1200, test: int = 1000, validation: int = 500) -> TwoViewDigits:
    """Return images, balanced over digits, of pairs of scans chosen at random by the seed.

    A sixth of the scans, the same for every seed, is for validation, so that settings chosen with one seed can be
    tested with another. The seed divides the others between training and testing.
    """
    counts = {"train": train, "test": test, "validation": validation}
    if any(count < 10 or count % 10 for count in counts.values()):
        given = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ValueError(f"The numbers of two-view digits must be multiples of 10; got {given}.")
    x, y = scans()
    generator = torch.Generator().manual_seed(seed)
    reserved = permutation(len(y), Stream.DIGITS_SPLIT)
    held_out, others = reserved[: len(y) // 6], reserved[len(y) // 6 :]
    order = others[torch.randperm(len(others), generator=generator)]
    half = len(order) // 2
    x_train, y_train = _pairs(x[order[:half]], y[order[:half]], train, generator)
    x_test, y_test = _pairs(x[order[half:]], y[order[half:]], test, generator)
    left, right = x_test.clone(), x_test.clone()
    left[:, :, :8] = 0
    right[:, :, 8:] = 0
    noisy = x_test + NOISE * torch.randn(x_test.shape, generator=generator)
    tests = {"clean": x_test, "left blank": left, "right blank": right, "noise": noisy.clamp(0, 1)}
    x_validation, y_validation = _pairs(x[held_out], y[held_out], validation, generator)
    return TwoViewDigits(x_train, y_train, tests, y_test, x_validation, y_validation)


def _pairs(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of two different scans of one digit, and their labels."""
    images, labels = [], []
    for digit in range(10):
        scans = x[y == digit]
        first = torch.randint(len(scans), (count // 10,), generator=generator)
        step = torch.randint(1, len(scans), (count // 10,), generator=generator)
        images.append(torch.cat([scans[first], scans[(first + step) % len(scans)]], dim=2))
        labels.append(torch.full((count // 10,), digit))
    return torch.cat(images), torch.cat(labels)


def scans() -> tuple[Tensor, Tensor]:
    """All scans (N, 8, 8) in [0, 1], and their labels."""
    from sklearn.datasets import load_digits  # importing it takes a second, so only when needed

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().view(-1, 8, 8) / 16, torch.from_numpy(labels)
