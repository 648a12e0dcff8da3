"""The ensemble methods of the paper, one file each. A method builds an ensemble and computes its training loss."""

from featureflock.methods.adp import ADP
from featureflock.methods.base import METHODS, LossOutput, Method
from featureflock.methods.deep_ensembles import DeepEnsembles
from featureflock.methods.dice import DICE
from featureflock.methods.feature_map import FeatureMAP
from featureflock.methods.feature_wgd import FeatureWGD
from featureflock.methods.function_wgd import FunctionWGD
from featureflock.methods.single import Single
from featureflock.methods.weight_wgd import WeightWGD
from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)

__all__ = ["METHODS", "LossOutput", "Method"]
__all__ += ["ADP", "DICE", "DeepEnsembles", "FeatureMAP", "FeatureWGD", "FunctionWGD", "Single", "WeightWGD"]
