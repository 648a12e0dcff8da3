"""Similarity of the members' class activation maps. The paper plots it and prints no numbers."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles
from featureflock.studies.study import STUDIES, Row, Study
from featureflock.training import RECIPES

STUDIES.add(
    "cam-similarity",
    Study(
        "Similarity of the members' class activation maps, clean and corrupted",
        tuple(
            Row(f"{title}, {data}", replace(recipe, method=method or recipe.method))
            for data, recipe in (
                ("CIFAR-10", RECIPES["cifar10-wrn16x4"].recipe),
                ("CIFAR-100", RECIPES["cifar100-wrn16x4"].recipe),
                ("ImageNet", RECIPES["imagenet-resnet50"].recipe),
            )
            for title, method in (("Deep Ensembles", DeepEnsembles()), ("feature-WGD", None))
        ),
        ("map_similarity", "corrupted_map_similarity"),
        seeds=3,
        source="Figure 3",
    ),
)
