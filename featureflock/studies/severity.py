"""Accuracy and NLL over 15 corruptions by severity. The paper plots them and prints no numbers."""

from dataclasses import replace

from featureflock.studies.study import STUDIES, Row, Study, with_deep_ensembles
from featureflock.training import RECIPES


def on_three_data_sets(members: int | None = None) -> tuple[Row, ...]:
    """Deep Ensembles and feature-WGD on CIFAR-10, CIFAR-100 and ImageNet; by default with the recipes' members."""
    names = {"CIFAR-10": "cifar10-wrn16x4", "CIFAR-100": "cifar100-wrn16x4", "ImageNet": "imagenet-resnet50"}
    recipes = {data: RECIPES[name].recipe for data, name in names.items()}
    return tuple(
        row
        for data, recipe in recipes.items()
        for row in with_deep_ensembles(replace(recipe, members=members or recipe.members), f", {data}")
    )


STUDIES.add(
    "severity",
    Study(
        "Accuracy and NLL by severity of the corruptions, 5 members",
        on_three_data_sets(members=5),
        tuple(f"{metric}_at_severity_{severity}" for metric in ("accuracy", "nll") for severity in range(1, 6)),
        source="Figures 2, 5 and 6",
    ),
)
