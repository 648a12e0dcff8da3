"""The paper's table 5: ADP and DICE on CIFAR-100. It takes all numbers but feature-WGD's from DICE's authors."""

from dataclasses import replace

from featureflock.methods import ADP, DICE, DeepEnsembles
from featureflock.studies.study import Row, Study, laptop
from featureflock.training import RECIPES, Recipe


def all_members(recipe: Recipe) -> Recipe:
    """Half of the members would leave both settings two, and the same network."""
    return replace(laptop(recipe), members=recipe.members)


STUDY = Study(
    "ADP and DICE on CIFAR-100",
    tuple(
        Row(f"{title}, {network}", recipe if method is None else replace(recipe, method=method), {"accuracy": accuracy})
        for network, recipe, accuracies in (
            (
                "ResNet-32 × 4",
                RECIPES["cifar100-resnet32"].recipe,
                ("77.4 ± 0.1", "77.5 ± 0.3", "77.9 ± 0.1", "77.6 ± 0.2"),
            ),
            (
                "WRN-28-2 × 3",
                RECIPES["cifar100-wrn28x2"].recipe,
                ("80.0 ± 0.2", "80.0 ± 0.2", "80.6 ± 0.1", "80.6 ± 0.2"),
            ),
        )
        for title, method, accuracy in zip(
            ("Deep Ensembles", "ADP", "DICE", "feature-WGD"),
            (DeepEnsembles(), ADP(), DICE(), None),
            accuracies,
            strict=True,
        )
    ),
    ("accuracy",),
    seeds=5,
    laptop=all_members,
)
