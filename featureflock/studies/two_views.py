"""Does each member rely on another view? Two-view digits, of which either half tells the class.

The paper has no such study: its hypothesis is that members learn different features of one class, and here it is known
which there are. `rows_of` is shared with dominoes.py.
"""

from dataclasses import replace

from featureflock.core.kernels import RBF
from featureflock.core.priors import Prior
from featureflock.data import Digits
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.models import MLPConfig
from featureflock.studies.study import Row, Study
from featureflock.training import RECIPES, Recipe

_BASE = replace(RECIPES["two-view-digits"].recipe, members=10)


def rows_of(recipe: Recipe, prior: Prior) -> tuple[Row, ...]:
    """Single networks, independent ones, and what a shared head, a prior and repulsion add one after another."""
    official = FeatureWGD(prior, subspace="weakest", kernel=RBF(bandwidth="official"))
    return (
        Row("Single", replace(recipe, method=Single(), members=1)),
        Row("Deep Ensembles", replace(recipe, method=DeepEnsembles())),
        Row("feature-MAP, shared head", replace(recipe, method=FeatureMAP(prior))),
        Row("feature-WGD", replace(recipe, method=FeatureWGD(prior))),
        Row("feature-WGD, authors' code", replace(recipe, method=official)),
    )


def view_columns(first: str, second: str) -> tuple[str, ...]:
    """Columns of a study of these two views."""
    return (
        "accuracy",
        f"only_{first}_accuracy",
        f"only_{second}_accuracy",
        f"only_{first}_best_member_accuracy",
        f"only_{second}_best_member_accuracy",
        "covered_views",
        f"{first}_share",
        "view_difference_by_input",
        "view_difference_on_average",
    )


def _laptop(recipe: Recipe) -> Recipe:
    """Five members of the same size on the same data: it is small as it is."""
    return replace(recipe, members=min(5, recipe.size))


def smoke_views(recipe: Recipe) -> Recipe:
    """A small perceptron, up to 3 members, 200 two-view digits, 2 epochs."""
    return replace(
        recipe,
        data=Digits(views=2),
        model=MLPConfig((16, 8)),
        members=min(3, recipe.size),
        subset=200,
        epochs=2,
        schedule="steps",
        decay_epochs=(),
        batch=50,
        learning_rate=0.05,
    )


STUDY = Study(
    "whether members rely on different halves of two-view digits; not in the paper",
    rows_of(_BASE, FeatureWGD().prior),
    view_columns("left", "right"),
    seeds=20,
    smoke=smoke_views,
    laptop=_laptop,
)
