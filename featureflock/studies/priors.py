"""Priors of feature-WGD on CIFAR-100."""

from featureflock.studies.study import STUDIES, Row, Study, paper_numbers
from featureflock.training import RECIPES

_ROWS = (
    Row("Normal", RECIPES["cifar100-wrn16x4-normal"].recipe, paper_numbers("82.7 | 0.628 | 0.245 | 0.017")),
    Row("Cauchy", RECIPES["cifar100-wrn16x4"].recipe, paper_numbers("82.9 | 0.624 | 0.243 | 0.017")),
    Row("Uniform", RECIPES["cifar100-wrn16x4-uniform"].recipe, paper_numbers("82.1 | 0.634 | 0.251 | 0.020")),
)
STUDIES.add("priors", Study("feature-WGD with three priors on CIFAR-100", _ROWS, source="Table 5"))
