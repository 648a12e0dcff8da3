"""The paper's table of widths on CIFAR-100: networks with more features to spare gain more."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.models import WideResNetConfig
from featureflock.studies.study import CLEAN, Row, Study
from featureflock.training import RECIPES

_OURS = RECIPES["cifar100-wrn16x4"].recipe

STUDY = Study(
    "what feature-WGD gains over Deep Ensembles with networks of other widths",
    tuple(
        Row(
            f"{title}, width {width}",
            replace(_OURS, model=WideResNetConfig(16, width), method=method),
            {"accuracy": accuracy},
        )
        for width, accuracies in ((2, ("80.1", "80.3")), (4, ("82.3", "82.9")), (8, ("83.6", "84.1")))
        for title, method, accuracy in zip(
            ("Deep Ensembles", "feature-WGD"), (DeepEnsembles(), _OURS.method), accuracies, strict=True
        )
    ),
    CLEAN,
    seeds=3,
)
