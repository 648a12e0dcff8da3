"""Published image data sets, loaded from the cache: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST."""

from dataclasses import dataclass
from typing import ClassVar

from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.sources.cache import load
from featureflock.data.sources.registry import PUBLISHED_SETS


@dataclass(frozen=True)
class PublishedImages(DataSet):
    """Small images from the cache, with random crops and flips in training."""

    published: ClassVar[str]
    """Name in `PUBLISHED_SETS` and of `featureflock data get`."""
    normalisation: ClassVar[Normalisation]

    padding: int = 4
    """Padding of random crops in training, in pixels on each side; 0 for no crops."""
    flip: bool = True
    """Flip images horizontally at random in training."""

    def load(self) -> Splits:
        arrays, published, norm = load(self.published), PUBLISHED_SETS[self.published], self.normalisation
        train = TensorExamples(arrays.train_x, arrays.train_y, normalisation=norm, padding=self.padding, flip=self.flip)
        test = TensorExamples(arrays.test_x, arrays.test_y, normalisation=norm)
        return Splits(train, test, published.classes, class_names=published.class_names)


@DATA_SETS.register("cifar10")
@dataclass(frozen=True)
class CIFAR10(PublishedImages):
    """50,000 + 10,000 colour images of 32 × 32 in 10 classes; download with `featureflock data get cifar10`."""

    published = "cifar10"
    normalisation = Normalisation.for_bytes((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784))
    train_size, input_shape = 50_000, (3, 32, 32)


@DATA_SETS.register("cifar100")
@dataclass(frozen=True)
class CIFAR100(PublishedImages):
    """50,000 + 10,000 colour images of 32 × 32 in 100 classes; download with `featureflock data get cifar100`."""

    published = "cifar100"
    normalisation = Normalisation.for_bytes((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    train_size, input_shape = 50_000, (3, 32, 32)


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
