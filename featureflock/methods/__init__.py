"""The ensemble methods of the paper: each a frozen dataclass that builds an ensemble and computes its training loss."""

from featureflock.methods.adp import ADP
from featureflock.methods.base import Method
from featureflock.methods.deep_ensembles import DeepEnsembles
from featureflock.methods.dice import DICE
from featureflock.methods.feature_map import FeatureMAP
from featureflock.methods.feature_wgd import FeatureWGD
from featureflock.methods.function_wgd import FunctionWGD
from featureflock.methods.single import Single
from featureflock.methods.weight_wgd import WeightWGD

__all__ = ["ADP", "DICE", "DeepEnsembles", "FeatureMAP", "FeatureWGD", "FunctionWGD", "Method", "Single", "WeightWGD"]
