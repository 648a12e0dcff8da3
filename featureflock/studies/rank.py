"""Rank of the projection on CIFAR-100: the dimension of the subspace in which the ten members repel each other.

At laptop scale, with 5 members, the ranks 3, 5 and 10 become 1, 2 and 5.
"""

from dataclasses import replace

from featureflock.core.priors import Cauchy
from featureflock.methods import FeatureWGD
from featureflock.studies.study import STUDIES, Row, Study
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn16x4"].recipe
_ROWS = tuple(
    Row(title, replace(_BASE, method=FeatureWGD(Cauchy(5e-3), rank=rank)), {"accuracy": accuracy})
    for title, rank, accuracy in (
        ("r = 3 of 10", 3, "82.7"),
        ("r = 5 of 10", 5, "82.9"),
        ("r = 10 of 10", 10, "82.7"),
        ("no projection", None, "82.7"),
    )
)
_TITLE = "feature-WGD with projections of different ranks on CIFAR-100"
STUDIES.add("rank", Study(_TITLE, _ROWS, seeds=3, source="Table 14"))
