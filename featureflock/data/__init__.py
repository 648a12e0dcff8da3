"""Data sets: where they come from, how they are kept, and how batches are made of them."""

from featureflock.data.augment import EpochKey, crop_and_flip
from featureflock.data.examples import Batch, Examples, Scale, TensorExamples, content_digest
from featureflock.data.input_format import InputFormat
from featureflock.data.rng import permutation, random_bits
from featureflock.data.sets.dominoes import Dominoes
from featureflock.data.sets.sets import (
    CIFAR10,
    CIFAR100,
    MNIST,
    CustomData,
    DataSet,
    Digits,
    FashionMNIST,
    HeldOut,
    ImageFolder,
    Splits,
)
from featureflock.data.sets.two_view_digits import TwoViewDigits, two_view_digits
from featureflock.data.sources.fetch import get
from featureflock.data.streaming import ExampleReader, StreamedExamples, from_dataset
from featureflock.data.views import View, only_view

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Batch",
    "CustomData",
    "DataSet",
    "Digits",
    "Dominoes",
    "EpochKey",
    "ExampleReader",
    "Examples",
    "FashionMNIST",
    "HeldOut",
    "ImageFolder",
    "InputFormat",
    "Scale",
    "Splits",
    "StreamedExamples",
    "TensorExamples",
    "TwoViewDigits",
    "View",
    "content_digest",
    "crop_and_flip",
    "from_dataset",
    "get",
    "only_view",
    "permutation",
    "random_bits",
    "two_view_digits",
]
