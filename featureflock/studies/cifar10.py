"""Five methods on CIFAR-10, ten WRN-16-4 each."""

from featureflock.methods import DeepEnsembles, FunctionWGD, Single, WeightWGD
from featureflock.studies.study import PAPER, STUDIES, Study, method_rows
from featureflock.training import RECIPES

_BASE = RECIPES["cifar10-wrn16x4"].recipe
_NUMBERS = {
    Single(): "95.4 ± 0.2 | 0.145 ± 0.006 | 0.069 ± 0.003 | 0.007 ± 0.000 | 73.7 | 0.796 | 0.349 | 0.020",
    DeepEnsembles(): "96.4 ± 0.1 | 0.110 ± 0.001 | 0.054 ± 0.001 | 0.007 ± 0.000 | 76.7 | 0.698 | 0.310 | 0.025",
    WeightWGD(): "96.4 ± 0.1 | 0.111 ± 0.002 | 0.054 ± 0.001 | 0.007 ± 0.001 | 76.7 | 0.702 | 0.312 | 0.026",
    FunctionWGD(): "96.1 ± 0.1 | 0.124 ± 0.001 | 0.059 ± 0.001 | 0.007 ± 0.001 | 75.7 | 0.736 | 0.322 | 0.024",
    _BASE.method: "96.5 ± 0.1 | 0.107 ± 0.001 | 0.052 ± 0.001 | 0.006 ± 0.001 | 77.3 | 0.681 | 0.302 | 0.020",
}
_TITLE = "WRN-16-4 × 10 on CIFAR-10, clean and corrupted"
STUDIES.add("cifar10", Study(_TITLE, method_rows(_BASE, _NUMBERS), PAPER, source="Table 1"))
