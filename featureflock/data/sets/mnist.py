"""MNIST and Fashion-MNIST."""

from dataclasses import dataclass

from featureflock.data.examples import Normalisation
from featureflock.data.sets.base import DATA_SETS
from featureflock.data.sets.published import PublishedImages


@DATA_SETS.register("mnist")
@dataclass(frozen=True)
class MNIST(PublishedImages):
    """60,000 + 10,000 handwritten digits of 28 × 28; download with `featureflock data get mnist`."""

    published = "mnist"
    normalisation = Normalisation.for_bytes((0.1307,), (0.3081,))

    padding: int = 0
    flip: bool = False


@DATA_SETS.register("fashion-mnist")
@dataclass(frozen=True)
class FashionMNIST(PublishedImages):
    """60,000 + 10,000 images of clothes, 28 × 28; download with `featureflock data get fashion-mnist`."""

    published = "fashion-mnist"
    normalisation = Normalisation.for_bytes((0.2860,), (0.3530,))

    padding: int = 2
