"""Two-view digits: a test of the paper's hypothesis on data that needs no download.

Each image is two different scans of the *same* digit side by side (8 × 16), so either half suffices to predict the
class: two views. An ensemble whose members use different views should lose little when one half is blank. The scans are
the 1,797 of scikit-learn's digits. No scan is used in both training and test images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 0.4
"""Standard deviation of the noise in the noisy test set, for pixels in [0, 1]."""


@dataclass(frozen=True)
class TwoViewDigits:
    """Images (N, 8, 16) in [0, 1] and labels (N,)."""

    x_train: Tensor
    y_train: Tensor
    x_test: dict[str, Tensor]
    """The same test images in four versions: "clean", "left blank", "right blank" and "noise"."""
    y_test: Tensor


def two_view_digits(seed: int = 0, *, train: int = 1200, test: int = 1000) -> TwoViewDigits:
    """Return `train` and `test` images, balanced over digits, of scans chosen at random by the seed."""
    if train < 10 or test < 10 or train % 10 or test % 10:
        raise ValueError(f"The numbers of two-view digits must be multiples of ten; got train={train}, test={test}.")
    from sklearn.datasets import load_digits  # importing it takes a second, so only when needed

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().view(-1, 8, 8) / 16
    y = torch.from_numpy(labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    half = len(y) // 2
    x_train, y_train = _pairs(x[order[:half]], y[order[:half]], train, generator)
    x_test, y_test = _pairs(x[order[half:]], y[order[half:]], test, generator)
    left, right = x_test.clone(), x_test.clone()
    left[:, :, :8] = 0
    right[:, :, 8:] = 0
    noisy = x_test + NOISE * torch.randn(x_test.shape, generator=generator)
    tests = {"clean": x_test, "left blank": left, "right blank": right, "noise": noisy.clamp(0, 1)}
    return TwoViewDigits(x_train, y_train, tests, y_test)


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
