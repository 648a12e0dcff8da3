"""Feature extractors and their configurations: one file per network.

    extractor = models.WideResNetConfig(depth=16, width=4).extractor((3, 32, 32))
    head = models.linear_head(extractor.feature_dim, 10)

Every extractor maps a batch to features (B, H), or (B, H, height, width), and stores H as `feature_dim`.
"""

from featureflock.models.base import MODELS, CustomModelConfig, ModelConfig, linear_head
from featureflock.models.cifar_resnet import CifarResNet, CifarResNetConfig
from featureflock.models.cnn import CNN, CNNConfig
from featureflock.models.dense_cnn import DenseCNN, DenseCNNConfig
from featureflock.models.fast_cnn import FastCNN, FastCNNConfig
from featureflock.models.mlp import MLP, MLPConfig
from featureflock.models.resnet import ResNet, ResNetConfig
from featureflock.models.sharing import RankOneConfig, SharedTrunkConfig
from featureflock.models.wide_resnet import WideResNet, WideResNetConfig
from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)

__all__ = ["MODELS", "CustomModelConfig", "ModelConfig", "linear_head"]
__all__ += ["CNN", "MLP", "CifarResNet", "DenseCNN", "FastCNN", "ResNet", "WideResNet"]
__all__ += ["CNNConfig", "CifarResNetConfig", "DenseCNNConfig", "FastCNNConfig", "MLPConfig", "RankOneConfig"]
__all__ += ["ResNetConfig", "SharedTrunkConfig", "WideResNetConfig"]
