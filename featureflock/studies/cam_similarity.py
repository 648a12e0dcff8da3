"""The paper's figure of feature diversity: how alike class activation maps of members are. It prints no numbers."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.study import Row, Study
from featureflock.training import RECIPES

STUDY = Study(
    "similarity of members' class activation maps, clean and corrupted",
    tuple(
        Row(f"{title}, {data}", recipe if method is None else replace(recipe, method=method))
        for data, recipe in (
            ("CIFAR-10", RECIPES["cifar10-wrn16x4"].recipe),
            ("CIFAR-100", RECIPES["cifar100-wrn16x4"].recipe),
            ("ImageNet", RECIPES["imagenet-resnet50"].recipe),
        )
        for title, method in (("Deep Ensembles", DeepEnsembles()), ("feature-WGD", None))
    ),
    ("map_similarity", "corrupted_map_similarity"),
    seeds=3,
)
