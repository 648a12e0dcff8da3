"""Three methods on ImageNet, five ResNet-50 each."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles, Single
from featureflock.studies.study import CLEAN, CORRUPTED, STUDIES, Row, Study, printed
from featureflock.training import RECIPES

_COLUMNS = (*CLEAN, *CORRUPTED)
_BASE = RECIPES["imagenet-resnet50"].recipe

STUDIES.add(
    "imagenet",
    Study(
        "ResNet-50 × 5 on ImageNet, clean and corrupted",
        (
            Row(
                "Single",
                replace(_BASE, method=Single(), members=1),
                printed(_COLUMNS, "75.7 | 0.954 | 0.338 | 0.018 | 37.7 | 3.235 | 0.738 | 0.021"),
            ),
            Row(
                "Deep Ensembles",
                replace(_BASE, method=DeepEnsembles()),
                printed(_COLUMNS, "78.0 | 0.853 | 0.309 | 0.019 | 40.9 | 3.011 | 0.706 | 0.015"),
            ),
            Row("feature-WGD", _BASE, printed(_COLUMNS, "78.0 | 0.859 | 0.309 | 0.015 | 42.4 | 2.923 | 0.693 | 0.018")),
        ),
        _COLUMNS,
        seeds=1,
        source="Table 3",
    ),
)
