"""The 15 corruptions of CIFAR-10-C and ImageNet-C: on batches of pictures, as whole sets, and read from disk."""

from featureflock.corruptions.apply import CORRUPTIONS, SEVERITIES, Name, corrupt
from featureflock.corruptions.files import CorruptedSet, find_sets, open_set, read_imagenet_c
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.generate import copy_set, generate_set

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "CorruptedSet",
    "Name",
    "copy_set",
    "corrupt",
    "find_sets",
    "frost_source",
    "generate_set",
    "open_set",
    "read_imagenet_c",
]
