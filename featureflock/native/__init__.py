"""Kernels of our own, where PyTorch leaves a processor idle."""

from featureflock.native.weight_gradient import faster_weight_gradients, is_worthwhile, weight_gradient
from featureflock.native.winograd import faster_convolutions, winograd

__all__ = ["faster_convolutions", "faster_weight_gradients", "is_worthwhile", "weight_gradient", "winograd"]
