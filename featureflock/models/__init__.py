"""Feature extractors with a `.feature_dim`, and the architectures by which a recipe names them.

extractor = models.WRN(depth=16, width=4).extractor((3, 32, 32))     # the same as models.WideResNet(16, 4)
head = models.linear_head(extractor.feature_dim, 10)
"""

from featureflock.models.base import (
    CifarResNetConfig,
    CNNConfig,
    CustomModelConfig,
    FastCNNConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    WideResNetConfig,
    linear_head,
)
from featureflock.models.fast_cnn import FastCNN
from featureflock.models.resnet import CifarResNet, ResNet
from featureflock.models.small import CNN, MLP
from featureflock.models.wide_resnet import WideResNet

__all__ = [
    "CNN",
    "MLP",
    "CNNConfig",
    "CifarResNet",
    "CifarResNetConfig",
    "CustomModelConfig",
    "FastCNN",
    "FastCNNConfig",
    "MLPConfig",
    "ModelConfig",
    "ResNet",
    "ResNetConfig",
    "WideResNet",
    "WideResNetConfig",
    "linear_head",
]
