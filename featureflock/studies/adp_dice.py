"""ADP and DICE on CIFAR-100. The paper takes all numbers but feature-WGD's from the authors of DICE."""

from dataclasses import replace

from featureflock.methods import ADP, DICE, DeepEnsembles
from featureflock.studies.study import STUDIES, Row, Study, laptop
from featureflock.training import RECIPES, Recipe


def laptop_all_members(recipe: Recipe) -> Recipe:
    """The laptop's recipe with all members: at most 4, they are few enough."""
    return replace(laptop(recipe), members=recipe.members)


_ACCURACIES = {
    ("ResNet-32 × 4", "cifar100-resnet32"): ("77.4 ± 0.1", "77.5 ± 0.3", "77.9 ± 0.1", "77.6 ± 0.2"),
    ("WRN-28-2 × 3", "cifar100-wrn28x2"): ("80.0 ± 0.2", "80.0 ± 0.2", "80.6 ± 0.1", "80.6 ± 0.2"),
}
_METHODS = {"Deep Ensembles": DeepEnsembles(), "ADP": ADP(), "DICE": DICE(), "feature-WGD": None}

STUDIES.add(
    "adp-dice",
    Study(
        "Comparison with ADP and DICE on CIFAR-100",
        tuple(
            Row(
                f"{title}, {network}",
                replace(RECIPES[name].recipe, method=method or RECIPES[name].recipe.method),
                {"accuracy": accuracy},
            )
            for (network, name), accuracies in _ACCURACIES.items()
            for (title, method), accuracy in zip(_METHODS.items(), accuracies, strict=True)
        ),
        ("accuracy",),
        seeds=5,
        source="Table 4",
        laptop=laptop_all_members,
    ),
)
