"""Two-view digits: a test of the paper's own hypothesis on data that needs no download.

Each picture is two different scans of the *same* digit side by side (8 × 16), so either half tells the class: two
views. An ensemble whose members look at different views should lose little when one half is blank. The scans are the
1,797 of scikit-learn's digits; those behind the test pictures are not behind the training pictures.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 0.4
"""Standard deviation of the noise in the noisy test set, where pixels are in [0, 1]."""


@dataclass(frozen=True)
class TwoViewDigits:
    """Pictures (N, 8, 16) in [0, 1] and labels (N,)."""

    x_train: Tensor
    y_train: Tensor
    x_test: dict[str, Tensor]
    """The same test pictures four times: "clean", "left blank", "right blank" and "noise"."""
    y_test: Tensor


def two_view_digits(seed: int = 0, *, train: int = 1200, test: int = 1000) -> TwoViewDigits:
    """`train` and `test` pictures, as many of each digit; which scans make them is drawn from the seed."""
    if train < 10 or test < 10 or train % 10 or test % 10:
        raise ValueError(f"Two-view digits come in multiples of ten pictures; got train={train}, test={test}.")
    from sklearn.datasets import load_digits  # takes a second, which other data need not wait for

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
    """Pictures of two different scans of one digit."""
    pictures, labels = [], []
    for digit in range(10):
        scans = x[y == digit]
        first = torch.randint(len(scans), (count // 10,), generator=generator)
        step = torch.randint(1, len(scans), (count // 10,), generator=generator)
        pictures.append(torch.cat([scans[first], scans[(first + step) % len(scans)]], dim=2))
        labels.append(torch.full((count // 10,), digit))
    return torch.cat(pictures), torch.cat(labels)
