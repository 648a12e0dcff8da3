"""The paper's tables 1 and 2: five ways to train ten WRN-16-4 on CIFAR-10 and on CIFAR-100."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles, FunctionWGD, Single, WeightWGD
from featureflock.recipes.study import CLEAN, CORRUPTED, Row, Study, printed
from featureflock.training import RECIPES, Recipe

_COLUMNS = (*CLEAN, *CORRUPTED)


def _study(data: str, recipe: Recipe, paper: dict[str, str]) -> Study:
    ways = {
        "Single": replace(recipe, method=Single(), members=1),
        "Deep Ensembles": replace(recipe, method=DeepEnsembles()),
        "weight-WGD": replace(recipe, method=WeightWGD()),
        "function-WGD": replace(recipe, method=FunctionWGD()),
        "feature-WGD": recipe,
    }
    rows = tuple(Row(title, way, printed(_COLUMNS, paper[title])) for title, way in ways.items())
    return Study(f"WRN-16-4 × 10 on {data}, clean and corrupted", rows, _COLUMNS, seeds=5)


CIFAR10 = _study(
    "CIFAR-10",
    RECIPES["cifar10-wrn16x4"].recipe,
    {
        "Single": "95.4 ± 0.2 | 0.145 ± 0.006 | 0.069 ± 0.003 | 0.007 ± 0.000 | 73.7 | 0.796 | 0.349 | 0.020",
        "Deep Ensembles": "96.4 ± 0.1 | 0.110 ± 0.001 | 0.054 ± 0.001 | 0.007 ± 0.000 | 76.7 | 0.698 | 0.310 | 0.025",
        "weight-WGD": "96.4 ± 0.1 | 0.111 ± 0.002 | 0.054 ± 0.001 | 0.007 ± 0.001 | 76.7 | 0.702 | 0.312 | 0.026",
        "function-WGD": "96.1 ± 0.1 | 0.124 ± 0.001 | 0.059 ± 0.001 | 0.007 ± 0.001 | 75.7 | 0.736 | 0.322 | 0.024",
        "feature-WGD": "96.5 ± 0.1 | 0.107 ± 0.001 | 0.052 ± 0.001 | 0.006 ± 0.001 | 77.3 | 0.681 | 0.302 | 0.020",
    },
)
CIFAR100 = _study(
    "CIFAR-100",
    RECIPES["cifar100-wrn16x4"].recipe,
    {
        "Single": "77.4 ± 0.3 | 0.835 ± 0.007 | 0.316 ± 0.003 | 0.030 ± 0.003 | 46.7 | 2.279 | 0.658 | 0.035",
        "Deep Ensembles": "82.3 ± 0.2 | 0.632 ± 0.004 | 0.249 ± 0.001 | 0.020 ± 0.001 | 52.9 | 1.971 | 0.590 | 0.032",
        "weight-WGD": "82.3 ± 0.1 | 0.633 ± 0.002 | 0.250 ± 0.001 | 0.021 ± 0.001 | 52.8 | 1.967 | 0.589 | 0.031",
        "function-WGD": "79.0 ± 0.1 | 0.715 ± 0.003 | 0.286 ± 0.001 | 0.018 ± 0.002 | 49.5 | 2.133 | 0.623 | 0.034",
        "feature-WGD": "82.9 ± 0.2 | 0.624 ± 0.002 | 0.243 ± 0.001 | 0.017 ± 0.001 | 53.5 | 1.955 | 0.584 | 0.029",
    },
)
