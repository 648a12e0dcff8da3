"""Width of the networks on CIFAR-100: wider networks gain more from feature-WGD."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.models import WideResNetConfig
from featureflock.studies.study import CLEAN, STUDIES, Row, Study
from featureflock.training import RECIPES

_BASE = RECIPES["cifar100-wrn16x4"].recipe

STUDIES.add(
    "width",
    Study(
        "feature-WGD and Deep Ensembles with networks of different widths on CIFAR-100",
        tuple(
            Row(
                f"{title}, width {width}",
                replace(_BASE, model=WideResNetConfig(16, width), method=method),
                {"accuracy": accuracy},
            )
            for width, accuracies in ((2, ("80.1", "80.3")), (4, ("82.3", "82.9")), (8, ("83.6", "84.1")))
            for title, method, accuracy in zip(
                ("Deep Ensembles", "feature-WGD"), (DeepEnsembles(), _BASE.method), accuracies, strict=True
            )
        ),
        CLEAN,
        seeds=3,
        source="Table 6",
    ),
)
