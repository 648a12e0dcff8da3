"""ADP and DICE on CIFAR-100. The paper takes all numbers but feature-WGD's from the authors of DICE."""

from dataclasses import replace

from featureflock.methods import ADP, DICE, DeepEnsembles
from featureflock.studies.study import STUDIES, Study, laptop, method_rows
from featureflock.training import RECIPES, Recipe

_RESNET = RECIPES["cifar100-resnet32"].recipe
_WRN = RECIPES["cifar100-wrn28x2"].recipe
_RESNET_NUMBERS = {
    DeepEnsembles(): "77.4 ± 0.1",
    ADP(): "77.5 ± 0.3",
    DICE(): "77.9 ± 0.1",
    _RESNET.method: "77.6 ± 0.2",
}
_WRN_NUMBERS = {DeepEnsembles(): "80.0 ± 0.2", ADP(): "80.0 ± 0.2", DICE(): "80.6 ± 0.1", _WRN.method: "80.6 ± 0.2"}


def laptop_all_members(recipe: Recipe) -> Recipe:
    """The laptop recipe with all members of the paper's, which are at most 4."""
    return replace(laptop(recipe), members=recipe.members)


STUDIES.add(
    "adp-dice",
    Study(
        "Comparison with ADP and DICE on CIFAR-100",
        method_rows(_RESNET, _RESNET_NUMBERS, ", ResNet-32 × 4") + method_rows(_WRN, _WRN_NUMBERS, ", WRN-28-2 × 3"),
        ("accuracy",),
        source="Table 4",
        laptop=laptop_all_members,
    ),
)
