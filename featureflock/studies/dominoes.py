"""Does each member rely on another view? Dominoes, of which one view, the digit, is far easier than the other.

The paper has no such study. The paper scale is its network and its scheme for CIFAR-10 on all pairs. A laptop has
perceptrons on 2,000 pairs: they fit them within seconds, and repulsion acts on networks that fit their data.
"""

from dataclasses import replace

from featureflock.data import Dominoes
from featureflock.methods import FeatureWGD
from featureflock.models import MLPConfig
from featureflock.studies.study import Study
from featureflock.studies.two_views import rows_of, smoke_views, view_columns
from featureflock.training import RECIPES, Recipe

_BASE = replace(RECIPES["cifar10-wrn16x4"].recipe, data=Dominoes())


def _laptop(recipe: Recipe) -> Recipe:
    """Five perceptrons of 128 and 64 units, 2,000 pairs, 15 epochs in one cycle."""
    return replace(
        recipe,
        model=MLPConfig((128, 64)),
        members=min(5, recipe.size),
        subset=2_000,
        epochs=15,
        batch=64,
        learning_rate=0.03,
        schedule="one-cycle",
        decay_epochs=(),
    )


STUDY = Study(
    "whether members rely on different halves of dominoes, a digit above a picture; not in the paper",
    rows_of(_BASE, FeatureWGD().prior),
    view_columns("digit", "picture"),
    seeds=5,
    smoke=smoke_views,
    laptop=_laptop,
    laptop_examples=2_000,
)
