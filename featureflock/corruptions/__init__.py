"""The 15 corruptions of CIFAR-10-C and ImageNet-C: applied to images, generated as sets, and read from files."""

from featureflock.corruptions.apply import CORRUPTIONS, SEVERITIES, check_corruption, corrupt
from featureflock.corruptions.files import CorruptedSet, find_sets, open_set, read_imagenet_c
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.generate import copy_set, generate_set

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "CorruptedSet",
    "check_corruption",
    "copy_set",
    "corrupt",
    "find_sets",
    "frost_source",
    "generate_set",
    "open_set",
    "read_imagenet_c",
]
