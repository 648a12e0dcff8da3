"""Kernels of our own, where PyTorch leaves a processor idle."""

from featureflock.cpu_kernels.graph_pass import faster_convolutions, is_worthwhile

__all__ = ["faster_convolutions", "is_worthwhile"]
