"""Rank of the projection on CIFAR-100: the dimension of the subspace in which the ten members repel each other.

At laptop scale, with 5 members, the ranks 3, 5 and 10 become 1, 2 and 5.
"""

from dataclasses import replace

from featureflock.core.priors import Cauchy
from featureflock.methods import FeatureWGD
from featureflock.studies.study import CLEAN, STUDIES, Row, Study
from featureflock.training import RECIPES

STUDIES.add(
    "rank",
    Study(
        "feature-WGD with projections of different ranks on CIFAR-100",
        tuple(
            Row(
                "no projection" if rank is None else f"r = {rank} of 10",
                replace(RECIPES["cifar100-wrn16x4"].recipe, method=FeatureWGD(Cauchy(5e-3), rank=rank)),
                {"accuracy": accuracy},
            )
            for rank, accuracy in ((3, "82.7"), (5, "82.9"), (10, "82.7"), (None, "82.7"))
        ),
        CLEAN,
        seeds=3,
        source="Table 14",
    ),
)
