"""Published image data sets, loaded from the cache."""

from dataclasses import dataclass
from typing import ClassVar

from featureflock.data.examples import Normalisation, TensorExamples
from featureflock.data.sets.base import DataSet, Splits
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
        arrays, published = load(self.published), PUBLISHED_SETS[self.published]
        norm = self.normalisation
        train = TensorExamples(arrays.train_x, arrays.train_y, normalisation=norm, padding=self.padding, flip=self.flip)
        test = TensorExamples(arrays.test_x, arrays.test_y, normalisation=norm)
        return Splits(train, test, published.classes, class_names=published.class_names)
