"""Data sets: download and cache, splits, batches and augmentation."""

from featureflock.data.augment import EpochKey
from featureflock.data.examples import Batch, Examples, Normalisation, TensorExamples, View, content_digest, only_view
from featureflock.data.input_format import InputFormat
from featureflock.data.rng import Stream, permutation
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.sets.custom import CustomData
from featureflock.data.sets.digit_scenes import DigitScenes
from featureflock.data.sets.digits import Digits, two_view_digits
from featureflock.data.sets.dominoes import Dominoes
from featureflock.data.sets.held_out import HeldOut
from featureflock.data.sets.image_folder import ImageFolder
from featureflock.data.sets.published import CIFAR10, CIFAR100, MNIST, FashionMNIST
from featureflock.data.sets.tabular import Diabetes, Diamonds
from featureflock.data.sources.fetch import get
from featureflock.data.streaming import ExampleReader, StreamedExamples, from_dataset

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DATA_SETS",
    "MNIST",
    "Batch",
    "CustomData",
    "DataSet",
    "Diabetes",
    "Diamonds",
    "DigitScenes",
    "Digits",
    "Dominoes",
    "EpochKey",
    "ExampleReader",
    "Examples",
    "FashionMNIST",
    "HeldOut",
    "ImageFolder",
    "InputFormat",
    "Normalisation",
    "Splits",
    "Stream",
    "StreamedExamples",
    "TensorExamples",
    "View",
    "content_digest",
    "from_dataset",
    "get",
    "only_view",
    "permutation",
    "two_view_digits",
]
