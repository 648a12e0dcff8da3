"""Dominoes: an MNIST digit above a CIFAR-10 image of the same class.

Class c is digit c above CIFAR-10's class c, so either half suffices to predict the class: two views, of which the digit
is by far the easier one. Networks trained by gradient descent prefer the easy view and may ignore the other
("simplicity bias", Shah et al. 2020, arXiv 2006.07710, on such pairs of MNIST and CIFAR-10). Blanking one view shows
which members of an ensemble rely on it.

Every CIFAR-10 image is used once. The digits of its class are shuffled and repeated if there are fewer of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples, View
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits, check_seed
from featureflock.data.sets.published import CIFAR10
from featureflock.data.sources.cache import load
from featureflock.data.sources.class_names import CIFAR10_CLASSES as CIFAR10_NAMES
from featureflock.data.sources.class_names import DIGITS

_SIZE = 32
_DIGIT = Normalisation.for_bytes((0.1000,) * 3, (0.2752,) * 3)
"""Mean and std of MNIST's training digits with a margin of two black pixels."""
_NORMALISATION = _DIGIT.above(CIFAR10.normalisation)


@DATA_SETS.register("dominoes")
@dataclass(frozen=True)
class Dominoes(DataSet):
    """50,000 + 10,000 images of 64 × 32, a digit above a photograph; needs `featureflock data get mnist` and `cifar10`.

    Each view is normalised by its own mean and std, so neither dominates. There is no augmentation: a flipped digit is
    not a digit, and a crop would move the border between the views.
    """

    pairs_seed: int = 0
    """Chooses the digit above each image."""

    train_size, input_shape = 50_000, (3, 2 * _SIZE, _SIZE)
    made_from = ("mnist", "cifar10")

    def __post_init__(self) -> None:
        check_seed("pairs_seed", self.pairs_seed)

    def load(self) -> Splits:
        digits, images = load("mnist"), load("cifar10")
        train = self._pairs(digits.train_x, digits.train_y, images.train_x, images.train_y, 0)
        test = self._pairs(digits.test_x, digits.test_y, images.test_x, images.test_y, 1)
        names = tuple(f"{digit} {name}" for digit, name in zip(DIGITS, CIFAR10_NAMES, strict=True))
        upper, lower, all_columns = slice(0, _SIZE), slice(_SIZE, 2 * _SIZE), slice(0, _SIZE)
        views = View("digit", upper, all_columns), View("image", lower, all_columns)
        return Splits(train, test, len(names), class_names=names, views=views)

    def _pairs(self, digits: Tensor, digit_y: Tensor, images: Tensor, image_y: Tensor, part: int) -> TensorExamples:
        """Return images (N, 3, 64, 32) in the order of the CIFAR-10 images."""
        margin = (_SIZE - digits.shape[-1]) // 2
        chosen = match_digits(digit_y, image_y, self.pairs_seed, part)
        upper = F.pad(digits, [margin] * 4)[chosen].expand(-1, 3, -1, -1)
        x = torch.cat([upper, images], dim=2).contiguous(memory_format=torch.channels_last)
        return TensorExamples(x, image_y, normalisation=_NORMALISATION)


def match_digits(digit_y: Tensor, image_y: Tensor, *keys: int) -> Tensor:
    """Return for each image the position of a digit of its class, chosen at random by the keys."""
    chosen = torch.empty_like(image_y)
    for label in image_y.unique().tolist():
        digits, positions = ((y == label).nonzero()[:, 0] for y in (digit_y, image_y))
        if not len(digits):
            raise ValueError(f"MNIST has no digit {label} to put above the images of class {label}.")
        order = permutation(len(digits), Stream.DOMINO_PAIRS, *keys, label)
        chosen[positions] = digits[order[torch.arange(len(positions)) % len(digits)]]
    return chosen
