"""Data sets, one file each. A new file that registers its class in `DATA_SETS` is found without further changes."""

from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.sets.cifar import CIFAR10, CIFAR100
from featureflock.data.sets.custom import CustomData
from featureflock.data.sets.digits import Digits
from featureflock.data.sets.dominoes import Dominoes
from featureflock.data.sets.held_out import HeldOut
from featureflock.data.sets.image_folder import ImageFolder
from featureflock.data.sets.mnist import MNIST, FashionMNIST
from featureflock.data.sets.two_view_digits import TwoViewDigits, two_view_digits
from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DATA_SETS",
    "MNIST",
    "CustomData",
    "DataSet",
    "Digits",
    "Dominoes",
    "FashionMNIST",
    "HeldOut",
    "ImageFolder",
    "Splits",
    "TwoViewDigits",
    "two_view_digits",
]
