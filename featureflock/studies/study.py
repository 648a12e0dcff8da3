"""A study: the rows of a table or figure, the paper's numbers, and how the recipes shrink to smaller scales.

    rows = (Row("Normal", normal), Row("Cauchy", cauchy, {"accuracy": "82.9"}))
    STUDIES.add("priors", Study("feature-WGD with two priors on CIFAR-100", rows, columns=("accuracy", "nll")))

A row's recipe is the paper's. Two functions make it smaller:

    smoke     built-in digits and networks of a few filters: seconds, to check that everything runs
    laptop    small networks on 5,000 images of CIFAR-10: hours on two cores
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from featureflock.core.priors import Cauchy, Normal
from featureflock.data import Digits
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation.endpoints import CLEAN, ENDPOINTS
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Method, Single
from featureflock.models import CNNConfig, FastCNNConfig, ResNetConfig, WideResNetConfig
from featureflock.training import RECIPES, Recipe
from featureflock.utils.registry import Registry

Scale = Literal["smoke", "laptop", "paper"]

PAPER = ENDPOINTS["classification"]
"""Columns of the paper's tables, in their order."""
_LAPTOP_PRECISION = 3e-3
"""Precision of feature priors at laptop scale: the best on held-out images (results/tuning_cifar10_laptop.json)."""


@dataclass(frozen=True)
class Row:
    """One row of a table, or one point of a curve."""

    title: str
    recipe: Recipe
    """The paper's recipe, with seed 0."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers by metric; accuracies in %."""


def paper_numbers(numbers: str) -> dict[str, str]:
    """The paper's numbers by metric, from a string such as "82.9 | 0.624": the first columns of `PAPER`."""
    return dict(zip(PAPER, filter(None, map(str.strip, numbers.split("|"))), strict=False))


def method_rows(recipe: Recipe, paper: Mapping[Method, str], suffix: str = "") -> tuple[Row, ...]:
    """A row for each method with the paper's numbers, titled after the method."""
    sizes = {method: 1 if isinstance(method, Single) else recipe.members for method in paper}
    return tuple(
        Row(method.title + suffix, replace(recipe, method=method, members=sizes[method]), paper_numbers(numbers))
        for method, numbers in paper.items()
    )


def with_deep_ensembles(recipe: Recipe, suffix: str = "") -> tuple[Row, ...]:
    """Deep Ensembles and the recipe's method, where the paper prints no numbers."""
    return method_rows(recipe, {DeepEnsembles(): "", recipe.method: ""}, suffix)


def laptop(recipe: Recipe) -> Recipe:
    """The recipe cifar10-laptop with the row's method, at most 5 members, and a width proportional to the paper's.

    Its 5,000 images are nearly fitted at the end of training: the method acts once the gradients of the data are small.
    """
    changes: dict[str, Any] = {}
    if (rank := getattr(recipe.method, "rank", None)) is not None:
        changes["rank"] = max(1, rank // 2)  # as there are half of the paper's ten members
    if isinstance(recipe.method, FeatureWGD | FeatureMAP) and isinstance(recipe.method.prior, Cauchy | Normal):
        changes["prior"] = replace(recipe.method.prior, precision=_LAPTOP_PRECISION)
    method = replace(recipe.method, **changes)  # type: ignore[type-var]
    width = _width(recipe)
    model = FastCNNConfig((2 * width, 8 * width, 16 * width))
    return replace(RECIPES["cifar10-laptop"].recipe, model=model, method=method, members=min(recipe.size, 5))


def smoke(recipe: Recipe) -> Recipe:
    """A network of a few filters, up to 4 members, 200 digits, 2 epochs."""
    return replace(
        recipe,
        data=Digits(),
        model=CNNConfig(_width(recipe)),
        members=min(4, recipe.size),
        subset=200,
        epochs=2,
        decay_epochs=(),
        batch=50,
        learning_rate=0.05,
    )


def _width(recipe: Recipe) -> int:
    """Width factor of a Wide ResNet. ImageNet's ResNet counts as the paper's usual network for CIFAR, WRN-16-4."""
    if isinstance(recipe.model, WideResNetConfig):
        return recipe.model.width
    return 4 if isinstance(recipe.model, ResNetConfig) else 2


@dataclass(frozen=True)
class Study:
    """A table or figure."""

    title: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = CLEAN
    """Keys of metrics."""
    seeds: int = 5
    """Number of seeds at the paper's scale."""
    source: str = ""
    """The table or figure of the paper; empty if the paper has no such study."""
    laptop: Callable[[Recipe], Recipe] = laptop
    """Shrinks a recipe for two cores."""
    smoke: Callable[[Recipe], Recipe] = smoke
    """Shrinks a recipe to seconds."""
    laptop_seeds: int = 3
    """Number of seeds at laptop scale."""
    laptop_examples: int | None = None
    """Test examples at laptop scale; None for all."""
    test_on: EvaluationProtocol | None = None
    """Test sets at the laptop and the paper scale; None to derive them from the columns."""
    endpoints: tuple[str, ...] = ()
    """Columns declared as endpoints beforehand: their p-values are corrected by Holm's method within a row."""
    new_subsets: bool = False
    """Whether each seed has its own training data: seed s is also the `split_seed` and, if it has one, the seed of the
    data set."""

    def __post_init__(self) -> None:
        if unknown := [key for key in self.endpoints if key not in self.columns]:
            raise ValueError(f"The endpoint {unknown[0]} is not among the columns of the study.")

    def rows_at(self, scale: Scale) -> list[tuple[Row, Recipe]]:
        """The rows and their recipes with seed 0. Rows whose recipes coincide at a smaller scale appear once."""
        shrink = {"smoke": self.smoke, "laptop": self.laptop}
        distinct: dict[str, tuple[Row, Recipe]] = {}
        for row in self.rows:
            recipe = shrink[scale](row.recipe) if scale in shrink else row.recipe
            distinct.setdefault(json.dumps(recipe.to_json(), sort_keys=True), (row, recipe))
        return list(distinct.values())

    def seeds_at(self, scale: Scale) -> int:
        return {"smoke": 2, "laptop": self.laptop_seeds, "paper": self.seeds}[scale]

    def protocol(self, scale: Scale) -> EvaluationProtocol:
        """Test sets: at smaller scales, a part of the test images or of the corrupted ones."""
        if self.test_on is not None and scale != "smoke":
            return self.test_on
        groups = {find_metric(column).group for column in self.columns}
        corrupted = not groups.isdisjoint({"corrupted", "severity"}) or any("corrupted" in c for c in self.columns)
        maps = 500 if any("map" in column for column in self.columns) else 0
        full = EvaluationProtocol(maps=maps, ood=None if "ood" in groups else ())
        full = full if corrupted else replace(full, corruptions=())
        if scale == "smoke":
            corruptions = ("gaussian_noise", "contrast") if corrupted else ()
            return replace(full, examples=100, corruptions=corruptions, severities=(1, 5), maps=min(maps, 20))
        if scale == "laptop":
            return replace(full, examples=self.laptop_examples, corrupted_examples=1_000)
        return full


STUDIES: Registry[Study] = Registry("study")
