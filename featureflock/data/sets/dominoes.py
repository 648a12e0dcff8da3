"""Dominoes: a handwritten digit of MNIST above a picture of CIFAR-10, both of the same class.

Class c is digit c above CIFAR-10's class c, so either half tells the class: two views, of which the digit is by far the
easier one. Networks that learn by gradient descent prefer the easy view and may ignore the other ("simplicity bias",
Shah et al. 2020, arXiv 2006.07710, who have such pairs of MNIST and CIFAR-10). Which view each member of an ensemble
relies on shows when the other is blank.

Every picture is used once, under a digit of its class: those are put in random order, and begun with again when there
are fewer of them. Training pairs are made of the two training sets, test pairs of the two test sets.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data.examples import TensorExamples, unit_scale
from featureflock.data.rng import permutation
from featureflock.data.sets.sets import CIFAR10, DataSet, Splits
from featureflock.data.sources.cache import load
from featureflock.data.sources.class_names import CIFAR10 as PICTURES
from featureflock.data.sources.class_names import DIGITS
from featureflock.data.views import View

_SIZE = 32
_PAIRS = 0x501
"""Which random numbers are for what."""
_TRAIN, _TEST = 0, 1
_DIGIT = unit_scale((0.1000,) * 3, (0.2752,) * 3)
"""Mean and deviation of MNIST's training digits with a margin of two black pixels."""
_SCALE = _DIGIT.above(CIFAR10.scale)


@dataclass(frozen=True)
class Dominoes(DataSet):
    """50,000 + 10,000 pictures of 64 × 32, a digit above a photograph. `featureflock data get mnist` and `featureflock
    data get cifar10` bring them.

    Each view is normalised by its own mean and deviation, so that neither is louder. They are not augmented: a flipped
    digit is no digit, and a crop would move the border between the views.
    """

    pairs_seed: int = 0
    """Draws which digit stands above which picture."""

    def __post_init__(self) -> None:
        if not 0 <= self.pairs_seed < 2**32:
            raise ValueError(f"pairs_seed must be at least 0 and below 2^32; got {self.pairs_seed}.")

    def load(self) -> Splits:
        digits, pictures = load("mnist"), load("cifar10")
        train_x = self._pairs(digits.train_x, digits.train_y, pictures.train_x, pictures.train_y, _TRAIN)
        test_x = self._pairs(digits.test_x, digits.test_y, pictures.test_x, pictures.test_y, _TEST)
        names = tuple(f"{digit} {picture}" for digit, picture in zip(DIGITS, PICTURES, strict=True))
        upper, lower, all_columns = slice(0, _SIZE), slice(_SIZE, 2 * _SIZE), slice(0, _SIZE)
        return Splits(
            TensorExamples(train_x, pictures.train_y, scale=_SCALE),
            TensorExamples(test_x, pictures.test_y, scale=_SCALE),
            len(names),
            names=names,
            views=(View("digit", upper, all_columns), View("picture", lower, all_columns)),
        )

    def _pairs(self, digits: Tensor, digit_y: Tensor, pictures: Tensor, picture_y: Tensor, part: int) -> Tensor:
        """(N, 3, 64, 32) in bytes, in the order of the pictures."""
        margin = (_SIZE - digits.shape[-1]) // 2
        chosen = paired(digit_y, picture_y, self.pairs_seed, part)
        upper = F.pad(digits, [margin] * 4)[chosen].expand(-1, 3, -1, -1)
        return torch.cat([upper, pictures], dim=2).contiguous(memory_format=torch.channels_last)


def paired(digit_y: Tensor, picture_y: Tensor, *keys: int) -> Tensor:
    """For each picture the position of a digit of its class, drawn by the keys."""
    chosen = torch.empty_like(picture_y)
    for label in picture_y.unique().tolist():
        digits, places = ((y == label).nonzero()[:, 0] for y in (digit_y, picture_y))
        if not len(digits):
            raise ValueError(f"There is no digit {label} to stand above the pictures of class {label}.")
        order = permutation(len(digits), _PAIRS, *keys, label)
        chosen[places] = digits[order[torch.arange(len(places)) % len(digits)]]
    return chosen
