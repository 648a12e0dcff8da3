"""A study: the rows of a table or figure, the paper's numbers, and how the recipes shrink to smaller scales.

    rows = (Row("Normal", normal), Row("Cauchy", cauchy, {"accuracy": "82.9"}))
    STUDIES.add("priors", Study("feature-WGD with two priors on CIFAR-100", rows, columns=("accuracy", "nll"), seeds=5))

A row's recipe is the paper's. Two functions make it smaller:

    smoke     embedded digits and networks of a few filters: seconds, to check that everything runs
    laptop    small networks on 5,000 images of CIFAR-10: hours on two cores
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from featureflock.core.priors import Cauchy, Normal
from featureflock.data import Digits
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.methods import FeatureMAP, FeatureWGD, Method
from featureflock.models import CNNConfig, FastCNNConfig, ResNetConfig, WideResNetConfig
from featureflock.training import RECIPES, Recipe
from featureflock.utils.registry import Registry

Scale = Literal["smoke", "laptop", "paper"]

CLEAN = ("accuracy", "nll", "brier", "ece")
CORRUPTED = ("corrupted_accuracy", "corrupted_nll", "corrupted_brier", "corrupted_ece")


@dataclass(frozen=True)
class Row:
    """One row of a table, or one point of a curve."""

    title: str
    recipe: Recipe
    """The paper's recipe, with seed 0."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers by metric; accuracies in %."""


def printed(columns: Sequence[str], numbers: str) -> dict[str, str]:
    """A row of the paper by metric, from numbers separated by bars."""
    return dict(zip(columns, (number.strip() for number in numbers.split("|")), strict=True))


def laptop(recipe: Recipe) -> Recipe:
    """The recipe cifar10-laptop with the row's method, at most 5 members, and a width proportional to the paper's.

    Its 5,000 images are nearly fitted at the end of training: the method acts once the gradients of the data are small.
    """
    width = _width(recipe)
    return replace(
        RECIPES["cifar10-laptop"].recipe,
        model=FastCNNConfig((2 * width, 8 * width, 16 * width)),
        method=_laptop_method(recipe.method),
        members=min(recipe.size, 5),
    )


_PRECISION = 3e-3
"""Precision of feature priors at laptop scale: the best on held-out images (results/tuning_cifar10_laptop.json)."""


def _laptop_method(method: Method) -> Method:
    """Half of the rank, as there are half of the paper's ten members, and the precision chosen at this scale."""
    changes: dict[str, Any] = {}
    rank = getattr(method, "rank", None)
    if rank is not None:
        changes["rank"] = max(1, rank // 2)
    if isinstance(method, FeatureWGD | FeatureMAP) and isinstance(method.prior, Cauchy | Normal):
        changes["prior"] = replace(method.prior, precision=_PRECISION)
    return replace(method, **changes)  # type: ignore[type-var]


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
    columns: tuple[str, ...]
    """Keys of metrics."""
    seeds: int
    """Number of seeds at the paper's scale."""
    source: str = ""
    """The table or figure of the paper; empty if the paper has no such study."""
    laptop: Callable[[Recipe], Recipe] = laptop
    """Shrinks a recipe for two cores."""
    smoke: Callable[[Recipe], Recipe] = smoke
    """Shrinks a recipe to seconds."""
    laptop_examples: int | None = None
    """Test examples at laptop scale; None for all."""
    test_on: EvaluationProtocol | None = None
    """What to test on at every scale; None to derive it from the columns."""

    def rows_at(self, scale: Scale) -> list[tuple[Row, Recipe]]:
        """The rows and their recipes with seed 0. Rows whose recipes coincide at a smaller scale appear once."""
        shrink = {"smoke": self.smoke, "laptop": self.laptop}
        distinct: dict[str, tuple[Row, Recipe]] = {}
        for row in self.rows:
            recipe = shrink[scale](row.recipe) if scale in shrink else row.recipe
            distinct.setdefault(json.dumps(recipe.to_json(), sort_keys=True), (row, recipe))
        return list(distinct.values())

    def seeds_at(self, scale: Scale) -> int:
        return {"smoke": 2, "laptop": 3, "paper": self.seeds}[scale]

    def protocol(self, scale: Scale) -> EvaluationProtocol:
        """What to test on: at smaller scales, a part of the test images or of the corrupted ones."""
        if self.test_on is not None:
            return self.test_on
        groups = {find_metric(column).group for column in self.columns}
        corrupted = not groups.isdisjoint({"corrupted", "severity"}) or any("corrupted" in c for c in self.columns)
        maps = 500 if any("map" in column for column in self.columns) else 0
        full = EvaluationProtocol(maps=maps, ood=None if "ood" in groups else ())
        if not corrupted:
            full = replace(full, corruptions=())
        if scale == "smoke":
            corruptions = ("gaussian_noise", "contrast") if corrupted else ()
            return replace(full, examples=100, corruptions=corruptions, severities=(1, 5), maps=min(maps, 20))
        if scale == "laptop":
            return replace(full, examples=self.laptop_examples, corrupted_examples=1_000)
        return full


STUDIES: Registry[Study] = Registry("study")
