"""Kernels of our own, where PyTorch leaves a processor idle."""

from featureflock.native.graphs import faster_convolutions, is_worthwhile

__all__ = ["faster_convolutions", "is_worthwhile"]
