"""Accuracy and NLL over 15 corruptions by severity. The paper plots them and prints no numbers."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.study import STUDIES, Row, Study
from featureflock.training import RECIPES

STUDIES.add(
    "severity",
    Study(
        "Accuracy and NLL by severity of the corruptions, 5 members",
        tuple(
            Row(f"{title}, {data}", replace(recipe, members=5, method=method or recipe.method))
            for data, recipe in (
                ("CIFAR-10", RECIPES["cifar10-wrn16x4"].recipe),
                ("CIFAR-100", RECIPES["cifar100-wrn16x4"].recipe),
                ("ImageNet", RECIPES["imagenet-resnet50"].recipe),
            )
            for title, method in (("Deep Ensembles", DeepEnsembles()), ("feature-WGD", None))
        ),
        tuple(f"{metric}_at_severity_{severity}" for metric in ("accuracy", "nll") for severity in range(1, 6)),
        seeds=5,
        source="Figures 2, 5 and 6",
    ),
)
