"""Class activation maps of members on CIFAR-100: Deep Ensembles above, feature-WGD below."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.adp_dice import laptop_all_members
from featureflock.studies.study import STUDIES, Row, Study
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn28x2"].recipe

STUDIES.add(
    "cam-figure",
    Study(
        "Class activation maps of the members of WRN-28-2 × 3 on CIFAR-100",
        (Row("Deep Ensembles", replace(_BASE, method=DeepEnsembles())), Row("feature-WGD", _BASE)),
        ("map_similarity",),
        seeds=1,
        source="Figure 1",
        laptop=laptop_all_members,
    ),
)
