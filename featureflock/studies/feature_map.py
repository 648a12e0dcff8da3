"""Ablation of the feature prior alone: one network on CIFAR-100 with and without it."""

from dataclasses import replace

from featureflock.methods import FeatureMAP, Single
from featureflock.studies.study import STUDIES, Study, method_rows
from featureflock.training import RECIPES

_ONE = replace(RECIPES["cifar100-wrn16x4"].recipe, members=1)
_NUMBERS = {Single(): "77.4 | 0.835 | 0.316 | 0.030", FeatureMAP(): "77.6 | 0.883 | 0.318 | 0.044"}
_TITLE = "A single network with and without the feature prior on CIFAR-100"
STUDIES.add("feature-map", Study(_TITLE, method_rows(_ONE, _NUMBERS), source="Table 13"))
