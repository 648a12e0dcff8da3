"""Kernels of our own, where PyTorch leaves a processor idle."""

from featureflock.native.weight_gradient import faster_weight_gradients, is_worthwhile, weight_gradient

__all__ = ["faster_weight_gradients", "is_worthwhile", "weight_gradient"]
