"""The paper's ablations on CIFAR-100: priors, feature-MAP, width and rank."""

from dataclasses import replace

from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.models import WRN
from featureflock.priors import Cauchy
from featureflock.recipes.study import CLEAN, Row, Study, laptop, printed
from featureflock.training import RECIPES, Recipe

_BASE = RECIPES["cifar100-wrn16x4"].recipe


PRIORS = Study(
    "feature-WGD with three priors",
    (
        Row("Normal", RECIPES["cifar100-wrn16x4-normal"].recipe, printed(CLEAN, "82.7 | 0.628 | 0.245 | 0.017")),
        Row("Cauchy", _BASE, printed(CLEAN, "82.9 | 0.624 | 0.243 | 0.017")),
        Row("Uniform", RECIPES["cifar100-wrn16x4-uniform"].recipe, printed(CLEAN, "82.1 | 0.634 | 0.251 | 0.020")),
    ),
    CLEAN,
    seeds=5,
)

FEATURE_MAP = Study(
    "one network with and without the prior on features",
    (
        Row("Single", replace(_BASE, method=Single(), members=1), printed(CLEAN, "77.4 | 0.835 | 0.316 | 0.030")),
        Row(
            "feature-MAP",
            replace(_BASE, method=FeatureMAP(), members=1),
            printed(CLEAN, "77.6 | 0.883 | 0.318 | 0.044"),
        ),
    ),
    CLEAN,
    seeds=5,
)


def _half_as_wide(recipe: Recipe) -> Recipe:
    """Widths 1, 2 and 4 for 2, 4 and 8: a quarter would leave two of them the same."""
    assert isinstance(recipe.model, WRN)
    return replace(laptop(recipe), model=WRN(10, recipe.model.width // 2))


WIDTH = Study(
    "what feature-WGD gains over Deep Ensembles with networks of other widths",
    tuple(
        Row(f"{title}, width {width}", replace(_BASE, model=WRN(16, width), method=method), {"accuracy": accuracy})
        for width, accuracies in ((2, ("80.1", "80.3")), (4, ("82.3", "82.9")), (8, ("83.6", "84.1")))
        for title, method, accuracy in zip(
            ("Deep Ensembles", "feature-WGD"), (DeepEnsembles(), _BASE.method), accuracies, strict=True
        )
    ),
    ("accuracy",),
    seeds=3,
    laptop=_half_as_wide,
)

RANK = Study(
    "feature-WGD with projections of other ranks",
    tuple(
        Row(
            "no projection" if rank is None else f"r = {rank}",
            replace(_BASE, method=FeatureWGD(Cauchy(5e-3), rank=rank)),
            {"accuracy": accuracy},
        )
        for rank, accuracy in ((3, "82.7"), (5, "82.9"), (10, "82.7"), (None, "82.7"))
    ),
    ("accuracy",),
    seeds=3,
)
