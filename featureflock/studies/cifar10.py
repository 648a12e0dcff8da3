"""Five methods on CIFAR-10, ten WRN-16-4 each. `five_methods` is shared with cifar100.py."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles, FunctionWGD, Single, WeightWGD
from featureflock.studies.study import CLEAN, CORRUPTED, STUDIES, Row, Study, printed
from featureflock.training import RECIPES, Recipe


def five_methods(recipe: Recipe, paper: dict[str, str]) -> tuple[Row, ...]:
    """Rows that differ in the method alone; `paper` holds the paper's numbers by title."""
    recipes = {
        "Single": replace(recipe, method=Single(), members=1),
        "Deep Ensembles": replace(recipe, method=DeepEnsembles()),
        "weight-WGD": replace(recipe, method=WeightWGD()),
        "function-WGD": replace(recipe, method=FunctionWGD()),
        "feature-WGD": recipe,
    }
    return tuple(Row(title, row, printed((*CLEAN, *CORRUPTED), paper[title])) for title, row in recipes.items())


_PAPER = {
    "Single": "95.4 ± 0.2 | 0.145 ± 0.006 | 0.069 ± 0.003 | 0.007 ± 0.000 | 73.7 | 0.796 | 0.349 | 0.020",
    "Deep Ensembles": "96.4 ± 0.1 | 0.110 ± 0.001 | 0.054 ± 0.001 | 0.007 ± 0.000 | 76.7 | 0.698 | 0.310 | 0.025",
    "weight-WGD": "96.4 ± 0.1 | 0.111 ± 0.002 | 0.054 ± 0.001 | 0.007 ± 0.001 | 76.7 | 0.702 | 0.312 | 0.026",
    "function-WGD": "96.1 ± 0.1 | 0.124 ± 0.001 | 0.059 ± 0.001 | 0.007 ± 0.001 | 75.7 | 0.736 | 0.322 | 0.024",
    "feature-WGD": "96.5 ± 0.1 | 0.107 ± 0.001 | 0.052 ± 0.001 | 0.006 ± 0.001 | 77.3 | 0.681 | 0.302 | 0.020",
}

STUDIES.add(
    "cifar10",
    Study(
        "WRN-16-4 × 10 on CIFAR-10, clean and corrupted",
        five_methods(RECIPES["cifar10-wrn16x4"].recipe, _PAPER),
        (*CLEAN, *CORRUPTED),
        seeds=5,
        source="Table 1",
    ),
)
