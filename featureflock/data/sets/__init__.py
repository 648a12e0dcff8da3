"""Data sets, one file each. A new file that registers its class in `DATA_SETS` is found without further changes."""

from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)
