"""Ablation of the feature prior alone: one network on CIFAR-100 with and without it."""

from dataclasses import replace

from featureflock.methods import FeatureMAP, Single
from featureflock.studies.study import CLEAN, STUDIES, Row, Study, printed
from featureflock.training import RECIPES

_ONE = replace(RECIPES["cifar100-wrn16x4"].recipe, members=1)

STUDIES.add(
    "feature-map",
    Study(
        "A single network with and without the feature prior on CIFAR-100",
        (
            Row("Single", replace(_ONE, method=Single()), printed(CLEAN, "77.4 | 0.835 | 0.316 | 0.030")),
            Row("feature-MAP", replace(_ONE, method=FeatureMAP()), printed(CLEAN, "77.6 | 0.883 | 0.318 | 0.044")),
        ),
        CLEAN,
        seeds=5,
        source="Table 13",
    ),
)
