"""The paper's first figure: class activation maps of members on CIFAR-100, Deep Ensembles above, feature-WGD below."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.adp_dice import all_members
from featureflock.studies.study import Row, Study
from featureflock.training import RECIPES

_OURS = RECIPES["cifar100-wrn28x2"].recipe

STUDY = Study(
    "a picture of where the members of WRN-28-2 × 3 look on CIFAR-100",
    (Row("Deep Ensembles", replace(_OURS, method=DeepEnsembles())), Row("feature-WGD", _OURS)),
    ("map_similarity",),
    seeds=1,
    laptop=all_members,
)
