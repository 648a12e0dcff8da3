"""CIFAR-10 and CIFAR-100."""

from dataclasses import dataclass

from featureflock.data.examples import Normalisation
from featureflock.data.sets.base import DATA_SETS
from featureflock.data.sets.published import PublishedImages


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
