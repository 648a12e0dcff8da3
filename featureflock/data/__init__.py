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
from featureflock.data.examples import Batch, Examples, InMemory, Scale, content_digest
from featureflock.data.getting import get
from featureflock.data.input_format import InputFormat
from featureflock.data.randomness import permutation, random_bits
from featureflock.data.streamed import Reader, Streamed, from_dataset
from featureflock.data.two_view_digits import TwoViewDigits, two_view_digits

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Batch",
    "DataSet",
    "Digits",
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
    "content_digest",
    "crop_and_flip",
    "from_dataset",
    "get",
    "permutation",
    "random_bits",
    "two_view_digits",
]
