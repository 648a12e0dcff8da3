"""The paper's ablation of the prior alone, on CIFAR-100: one network with and without it."""

from dataclasses import replace

from featureflock.methods import FeatureMAP, Single
from featureflock.studies.study import CLEAN, Row, Study, printed
from featureflock.training import RECIPES

_ONE = replace(RECIPES["cifar100-wrn16x4"].recipe, members=1)

STUDY = Study(
    "one network with and without the prior on features",
    (
        Row("Single", replace(_ONE, method=Single()), printed(CLEAN, "77.4 | 0.835 | 0.316 | 0.030")),
        Row("feature-MAP", replace(_ONE, method=FeatureMAP()), printed(CLEAN, "77.6 | 0.883 | 0.318 | 0.044")),
    ),
    CLEAN,
    seeds=5,
)
