"""Do members rely on different views? Dominoes: the digit is a far easier view than the image below it.

The paper scale uses its network and training scheme for CIFAR-10 on all pairs. The laptop scale uses multilayer
perceptrons on 2,000 pairs, which fit them within seconds: repulsion acts on networks that fit their data.
"""

from dataclasses import replace

from featureflock.data import Dominoes
from featureflock.models import MLPConfig
from featureflock.studies.study import STUDIES, Study
from featureflock.studies.two_views import smoke_views, view_columns, view_rows
from featureflock.training import RECIPES, Recipe


def _laptop(recipe: Recipe) -> Recipe:
    """Five perceptrons of 128 and 64 units, 2,000 pairs, 15 epochs with a one-cycle schedule."""
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


STUDIES.add(
    "dominoes",
    Study(
        "Whether members rely on different halves of dominoes, a digit above an image",
        view_rows(replace(RECIPES["cifar10-wrn16x4"].recipe, data=Dominoes())),
        view_columns("digit", "image"),
        smoke=smoke_views,
        laptop=_laptop,
        laptop_examples=2_000,
    ),
)
