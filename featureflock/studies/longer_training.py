"""Not in the paper: twice its training.

Repulsion acts where the data's gradients have died down, so longer training should be in its favour. At the laptop's
scale this is the setting that was ahead of Deep Ensembles on held-out pictures (results/laptop_search.json).
"""

from dataclasses import replace

from featureflock.core.priors import Cauchy
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.studies.study import CLEAN, Row, Study, laptop
from featureflock.training import RECIPES, Recipe

_OURS = replace(RECIPES["cifar10-wrn16x4"].recipe, epochs=600, decay_epochs=(300, 450))


def _laptop(recipe: Recipe) -> Recipe:
    """Twice the epochs too, in batches of the paper's size, and the precision that was best with them."""
    longer = replace(laptop(recipe), epochs=16, batch=128, learning_rate=0.2)
    if isinstance(recipe.method, FeatureWGD):
        return replace(longer, method=replace(recipe.method, prior=Cauchy(3e-2), rank=2))
    return longer


STUDY = Study(
    "Deep Ensembles and feature-WGD trained twice as long",
    (Row("Deep Ensembles", replace(_OURS, method=DeepEnsembles())), Row("feature-WGD", _OURS)),
    (*CLEAN, "member_accuracy", "disagreement"),
    seeds=5,
    laptop=_laptop,
)
