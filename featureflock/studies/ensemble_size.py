"""Large ensembles on CIFAR-100: accuracy and NLL up to 20 members. The paper plots them and prints no numbers.

Members of Deep Ensembles are independent, so the smaller ones are sub-ensembles of the largest and are not trained.
"""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.study import STUDIES, Row, Study, laptop
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn16x4"].recipe

STUDIES.add(
    "ensemble-size",
    Study(
        "Deep Ensembles and feature-WGD with 2 to 20 members on CIFAR-100",
        tuple(
            Row(method.title, replace(_BASE, method=method, members=members))
            for method in (DeepEnsembles(), _BASE.method)
            for members in (2, 4, 10, 20)
        ),
        seeds=3,
        source="Figure 4",
        laptop=lambda recipe: replace(laptop(recipe), members=recipe.size // 2),
    ),
)
