"""Class activation maps of members on CIFAR-100: Deep Ensembles above, feature-WGD below."""

from featureflock.studies.adp_dice import laptop_all_members
from featureflock.studies.study import STUDIES, Study, with_deep_ensembles
from featureflock.training import RECIPES

STUDIES.add(
    "cam-figure",
    Study(
        "Class activation maps of the members of WRN-28-2 × 3 on CIFAR-100",
        with_deep_ensembles(RECIPES["cifar100-wrn28x2"].recipe),
        ("map_similarity",),
        seeds=1,
        source="Figure 1",
        laptop=laptop_all_members,
    ),
)
