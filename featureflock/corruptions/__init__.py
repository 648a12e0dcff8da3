"""The 15 corruptions of CIFAR-10-C and ImageNet-C: on batches of pictures, as whole sets, and read from disk."""

from featureflock.corruptions.corrupting import CORRUPTIONS, SEVERITIES, Name, corrupt
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.making import copy_set, make_set
from featureflock.corruptions.sets import CorruptedSet, folders_with_sets, open_set, read_imagenet_c

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "CorruptedSet",
    "Name",
    "copy_set",
    "corrupt",
    "folders_with_sets",
    "frost_source",
    "make_set",
    "open_set",
    "read_imagenet_c",
]
