"""Width of the networks on CIFAR-100: wider networks gain more from feature-WGD."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.models import WideResNetConfig
from featureflock.studies.study import STUDIES, Study, method_rows
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn16x4"].recipe
_ROWS = tuple(
    row
    for width, baseline, ours in ((2, "80.1", "80.3"), (4, "82.3", "82.9"), (8, "83.6", "84.1"))
    for row in method_rows(
        replace(_BASE, model=WideResNetConfig(16, width)),
        {DeepEnsembles(): baseline, _BASE.method: ours},
        f", width {width}",
    )
)
_TITLE = "feature-WGD and Deep Ensembles with networks of different widths on CIFAR-100"
STUDIES.add("width", Study(_TITLE, _ROWS, seeds=3, source="Table 6"))
