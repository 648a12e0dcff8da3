"""The paper's figure of large ensembles on CIFAR-100: accuracy and NLL up to 20 members. It prints no numbers.

Members of Deep Ensembles do not know of each other, so that smaller ones are parts of the largest.
"""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.study import CLEAN, Row, Study, laptop
from featureflock.training import RECIPES

_OURS = RECIPES["cifar100-wrn16x4"].recipe

STUDY = Study(
    "Deep Ensembles and feature-WGD of 2 to 20 members",
    tuple(
        Row(title, replace(_OURS, method=method, members=members))
        for title, method in (("Deep Ensembles", DeepEnsembles()), ("feature-WGD", _OURS.method))
        for members in (2, 4, 10, 20)
    ),
    CLEAN,
    seeds=3,
    laptop=lambda recipe: replace(laptop(recipe), members=recipe.size // 2),
)
