"""Do members rely on different views? Two-view digits: either half of an image determines the class.

The paper's hypothesis is that members learn different features of one class. Here these features are known: the two
halves. `view_rows` and the other functions are shared with dominoes.py.
"""

from dataclasses import replace

from featureflock.core.kernels import RBF
from featureflock.data import Digits
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.models import MLPConfig
from featureflock.studies.study import STUDIES, Row, Study, method_rows, smoke
from featureflock.training import RECIPES, Recipe


def view_rows(recipe: Recipe) -> tuple[Row, ...]:
    """A single network, Deep Ensembles, a shared head with a prior, and feature-WGD in two variants."""
    ours = FeatureWGD()
    official = replace(ours, subspace="weakest", kernel=RBF(bandwidth="official"))
    return (
        *method_rows(recipe, {Single(): "", DeepEnsembles(): ""}),
        Row("feature-MAP, shared head", replace(recipe, method=FeatureMAP(ours.prior))),
        Row("feature-WGD", replace(recipe, method=ours)),
        Row("feature-WGD, authors' code", replace(recipe, method=official)),
    )


def view_columns(first: str, second: str) -> tuple[str, ...]:
    """Columns of a study with these two views."""
    alone = [f"only_{view}_{metric}" for metric in ("accuracy", "best_member_accuracy") for view in (first, second)]
    differences = ("view_difference_by_input", "view_difference_on_average")
    return ("accuracy", *alone, "covered_views", f"{first}_share", *differences)


def smoke_views(recipe: Recipe) -> Recipe:
    """A small multilayer perceptron, up to 3 members, 200 two-view digits, 2 epochs."""
    members = min(3, recipe.size)
    return replace(smoke(recipe), data=Digits(views=2), model=MLPConfig((16, 8)), members=members, schedule="steps")


STUDIES.add(
    "two-views",
    Study(
        "Whether members rely on different halves of two-view digits",
        view_rows(replace(RECIPES["two-view-digits"].recipe, members=10)),
        view_columns("left", "right"),
        seeds=20,
        smoke=smoke_views,
        laptop=lambda recipe: replace(recipe, members=min(5, recipe.size)),  # data and networks are small already
    ),
)
