"""The paper's other tables: ImageNet, and the comparison with ADP and DICE."""

from dataclasses import replace

from featureflock.methods import ADP, DICE, DeepEnsembles, Single
from featureflock.recipes.study import CLEAN, CORRUPTED, Row, Study, laptop, printed
from featureflock.training import RECIPES, Recipe

_COLUMNS = (*CLEAN, *CORRUPTED)
_IMAGENET = RECIPES["imagenet-resnet50"].recipe


IMAGENET = Study(
    "ResNet-50 × 5 on ImageNet, clean and corrupted",
    (
        Row(
            "Single",
            replace(_IMAGENET, method=Single(), members=1),
            printed(_COLUMNS, "75.7 | 0.954 | 0.338 | 0.018 | 37.7 | 3.235 | 0.738 | 0.021"),
        ),
        Row(
            "Deep Ensembles",
            replace(_IMAGENET, method=DeepEnsembles()),
            printed(_COLUMNS, "78.0 | 0.853 | 0.309 | 0.019 | 40.9 | 3.011 | 0.706 | 0.015"),
        ),
        Row("feature-WGD", _IMAGENET, printed(_COLUMNS, "78.0 | 0.859 | 0.309 | 0.015 | 42.4 | 2.923 | 0.693 | 0.018")),
    ),
    _COLUMNS,
    seeds=1,
)


def _all_members(recipe: Recipe) -> Recipe:
    """The usual way would leave both settings two members, and the same network."""
    return replace(laptop(recipe), members=recipe.members)


ADP_DICE = Study(
    "ADP and DICE on CIFAR-100; the paper takes all but feature-WGD from DICE's authors",
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
    laptop=_all_members,
)
