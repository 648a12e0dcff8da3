"""The handwritten digits of scikit-learn."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.sets.two_view_digits import two_view_digits
from featureflock.data.sources.class_names import DIGITS
from featureflock.data.views import View


@DATA_SETS.register("digits")
@dataclass(frozen=True)
class Digits(DataSet):
    """The 1,797 scans of handwritten digits included in scikit-learn; no download needed."""

    views: Literal[1, 2] = 1
    """1: single scans of 8 × 8, 1,200 for training. 2: two scans of the same digit side by side, 8 × 16."""

    def load(self) -> Splits:
        if self.views == 2:
            pairs = two_view_digits()
            x_train, x_test = ((16 * x).to(torch.uint8)[:, None] for x in (pairs.x_train, pairs.x_test["clean"]))
            halves = (View("left", slice(0, 8), slice(0, 8)), View("right", slice(0, 8), slice(8, 16)))
            return _splits(x_train, pairs.y_train, x_test, pairs.y_test, halves)
        from sklearn.datasets import load_digits  # importing it takes a second, so only when needed

        images, labels = load_digits(return_X_y=True)
        order = permutation(len(labels), Stream.DIGITS_SPLIT)
        x, y = torch.from_numpy(images).to(torch.uint8).view(-1, 1, 8, 8)[order], torch.from_numpy(labels)[order]
        return _splits(x[:1200], y[:1200], x[1200:], y[1200:])


def _splits(x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor, views: tuple[View, ...] = ()) -> Splits:
    normalisation = Normalisation((0.0,), (16.0,))
    train = TensorExamples(x_train, y_train, normalisation=normalisation, white=16)
    test = TensorExamples(x_test, y_test, normalisation=normalisation, white=16)
    return Splits(train, test, 10, class_names=DIGITS, views=views)
