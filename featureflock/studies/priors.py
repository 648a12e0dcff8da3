"""Priors of feature-WGD on CIFAR-100."""

from featureflock.studies.study import CLEAN, STUDIES, Row, Study, printed
from featureflock.training import RECIPES

STUDIES.add(
    "priors",
    Study(
        "feature-WGD with three priors on CIFAR-100",
        (
            Row("Normal", RECIPES["cifar100-wrn16x4-normal"].recipe, printed(CLEAN, "82.7 | 0.628 | 0.245 | 0.017")),
            Row("Cauchy", RECIPES["cifar100-wrn16x4"].recipe, printed(CLEAN, "82.9 | 0.624 | 0.243 | 0.017")),
            Row("Uniform", RECIPES["cifar100-wrn16x4-uniform"].recipe, printed(CLEAN, "82.1 | 0.634 | 0.251 | 0.020")),
        ),
        CLEAN,
        seeds=5,
        source="Table 5",
    ),
)
