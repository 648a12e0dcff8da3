"""Twice the paper's training time.

Repulsion acts once the gradients of the data are small, so longer training should favour it. At laptop scale, this
configuration was ahead of Deep Ensembles on held-out images (results/laptop_search.json).
"""

from dataclasses import replace

from featureflock.core.priors import Cauchy
from featureflock.evaluation.endpoints import CLEAN
from featureflock.methods import FeatureWGD
from featureflock.studies.study import STUDIES, Study, laptop, with_deep_ensembles
from featureflock.training import RECIPES, Recipe


def _laptop(recipe: Recipe) -> Recipe:
    """Twice the laptop's epochs, the paper's batch size, and the precision that was best with both."""
    longer = replace(laptop(recipe), epochs=16, batch=128, learning_rate=0.2)
    if isinstance(recipe.method, FeatureWGD):
        return replace(longer, method=replace(recipe.method, prior=Cauchy(3e-2), rank=2))
    return longer


STUDIES.add(
    "longer-training",
    Study(
        "Deep Ensembles and feature-WGD trained twice as long on CIFAR-10",
        with_deep_ensembles(replace(RECIPES["cifar10-wrn16x4"].recipe, epochs=600, decay_epochs=(300, 450))),
        (*CLEAN, "member_accuracy", "disagreement"),
        laptop=_laptop,
    ),
)
