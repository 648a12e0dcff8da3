"""Data sets: where they come from, how they are kept, and how batches are made of them."""

from featureflock.data.augment import Draw, crop_and_flip
from featureflock.data.datasets import (
    CIFAR10,
    CIFAR100,
    MNIST,
    DataSet,
    Digits,
    FashionMNIST,
    HeldOut,
    ImageFolder,
    OwnData,
    Splits,
)
from featureflock.data.dominoes import Dominoes
from featureflock.data.examples import Batch, Examples, InMemory, Scale, content_digest
from featureflock.data.getting import get
from featureflock.data.input_format import InputFormat
from featureflock.data.randomness import permutation, random_bits
from featureflock.data.streamed import Reader, Streamed, from_dataset
from featureflock.data.two_view_digits import TwoViewDigits, two_view_digits
from featureflock.data.views import View, only_view

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Batch",
    "DataSet",
    "Digits",
    "Dominoes",
    "Draw",
    "Examples",
    "FashionMNIST",
    "HeldOut",
    "ImageFolder",
    "InMemory",
    "InputFormat",
    "OwnData",
    "Reader",
    "Scale",
    "Splits",
    "Streamed",
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
