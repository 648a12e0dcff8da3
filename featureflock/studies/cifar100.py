"""Five methods on CIFAR-100, ten WRN-16-4 each."""

from featureflock.methods import DeepEnsembles, FunctionWGD, Single, WeightWGD
from featureflock.studies.study import PAPER, STUDIES, Study, method_rows
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn16x4"].recipe
_NUMBERS = {
    Single(): "77.4 ± 0.3 | 0.835 ± 0.007 | 0.316 ± 0.003 | 0.030 ± 0.003 | 46.7 | 2.279 | 0.658 | 0.035",
    DeepEnsembles(): "82.3 ± 0.2 | 0.632 ± 0.004 | 0.249 ± 0.001 | 0.020 ± 0.001 | 52.9 | 1.971 | 0.590 | 0.032",
    WeightWGD(): "82.3 ± 0.1 | 0.633 ± 0.002 | 0.250 ± 0.001 | 0.021 ± 0.001 | 52.8 | 1.967 | 0.589 | 0.031",
    FunctionWGD(): "79.0 ± 0.1 | 0.715 ± 0.003 | 0.286 ± 0.001 | 0.018 ± 0.002 | 49.5 | 2.133 | 0.623 | 0.034",
    _BASE.method: "82.9 ± 0.2 | 0.624 ± 0.002 | 0.243 ± 0.001 | 0.017 ± 0.001 | 53.5 | 1.955 | 0.584 | 0.029",
}
_TITLE = "WRN-16-4 × 10 on CIFAR-100, clean and corrupted"
STUDIES.add("cifar100", Study(_TITLE, method_rows(_BASE, _NUMBERS), PAPER, source="Table 2"))
