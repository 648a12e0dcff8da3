"""Feature extractors with a `.feature_dim`, and the architectures by which a recipe names them.

extractor = models.WRN(depth=16, width=4).extractor((3, 32, 32))     # the same as models.WideResNet(16, 4)
head = models.linear_head(extractor.feature_dim, 10)
"""

from featureflock.models.architecture import (
    CNN,
    MLP,
    WRN,
    Architecture,
    FastCNN,
    OwnModel,
    ResNetCIFAR,
    ResNetImageNet,
    linear_head,
)
from featureflock.models.fast import FastConvNet
from featureflock.models.resnet import CifarResNet, ResNet
from featureflock.models.small import ConvNet, Perceptron
from featureflock.models.wide_resnet import WideResNet

__all__ = [
    "CNN",
    "MLP",
    "WRN",
    "Architecture",
    "CifarResNet",
    "ConvNet",
    "FastCNN",
    "FastConvNet",
    "OwnModel",
    "Perceptron",
    "ResNet",
    "ResNetCIFAR",
    "ResNetImageNet",
    "WideResNet",
    "linear_head",
]
