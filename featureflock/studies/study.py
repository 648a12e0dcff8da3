"""A table or figure of the paper as a study: rows that differ in what it is about, and the paper's numbers.

A row's recipe is the paper's. Two functions make it smaller:

    smoke     embedded digits and a few filters, to see in seconds that all of it runs
    laptop    real CIFAR-10 and small networks, for hours on two cores
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from featureflock.core.priors import Cauchy, Normal
from featureflock.data import Digits
from featureflock.evaluation import EvaluationProtocol
from featureflock.methods import FeatureMAP, FeatureWGD, Method
from featureflock.models import CNNConfig, FastCNNConfig, ResNetConfig, WideResNetConfig
from featureflock.training import RECIPES, Recipe
from featureflock.training.recipe import describe

Scale = Literal["smoke", "laptop", "paper"]

CLEAN = ("accuracy", "nll", "brier", "ece")
CORRUPTED = ("corrupted_accuracy", "corrupted_nll", "corrupted_brier", "corrupted_ece")


@dataclass(frozen=True)
class Row:
    """One setting: a line of a table, or a point of a curve."""

    title: str
    recipe: Recipe
    """The paper's, with seed 0."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """What the paper prints, by metric; accuracies in %."""


def printed(columns: Sequence[str], numbers: str) -> dict[str, str]:
    """A row of the paper, by metric; its numbers stand between bars."""
    return dict(zip(columns, (number.strip() for number in numbers.split("|")), strict=True))


def laptop(recipe: Recipe) -> Recipe:
    """The recipe cifar10-laptop with the row's method, at most 5 members and a width in proportion to its network's.

    Its 5,000 pictures are nearly fitted at the end: the method acts where the gradients of the data have died down.
    """
    width = _width(recipe)
    return replace(
        RECIPES["cifar10-laptop"].recipe,
        model=FastCNNConfig((2 * width, 8 * width, 16 * width)),
        method=_for_laptop(recipe.method),
        members=min(recipe.size, 5),
    )


_PRECISION = 3e-3
"""Of priors on features at the laptop's scale: the best on held-out pictures (results/tuning_cifar10_laptop.json)."""


def _for_laptop(method: Method) -> Method:
    """Half of the rank, as there are half of the paper's ten members, and the precision chosen for features."""
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


@dataclass(frozen=True)
class Study:
    """A table or figure."""

    what: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    """Metrics, as an evaluation's summaries call them."""
    seeds: int
    """That the paper has."""
    laptop: Callable[[Recipe], Recipe] = laptop
    """How a recipe is made smaller for two cores, where the usual way would lose what the study is about."""
    smoke: Callable[[Recipe], Recipe] = smoke
    """The same for seconds."""
    laptop_examples: int | None = None
    """Test examples of a laptop; None for all."""

    def rows_at(self, scale: Scale) -> list[tuple[Row, Recipe]]:
        """The rows with their recipes, seed 0; what comes out the same at a smaller scale is there once."""
        small = {"smoke": self.smoke, "laptop": self.laptop}
        found: dict[str, tuple[Row, Recipe]] = {}
        for row in self.rows:
            recipe = small[scale](row.recipe) if scale in small else row.recipe
            found.setdefault(json.dumps(describe(recipe), sort_keys=True), (row, recipe))
        return list(found.values())

    def seeds_at(self, scale: Scale) -> int:
        return {"smoke": 2, "laptop": 3, "paper": self.seeds}[scale]

    def protocol(self, scale: Scale) -> EvaluationProtocol:
        """What it is measured on: at smaller scales some of the test pictures, or of the corrupted ones."""
        corrupted = any("corrupted" in column or "severity" in column for column in self.columns)
        maps = 500 if any("map" in column for column in self.columns) else 0
        everything = EvaluationProtocol(maps=maps, unfamiliar=())
        if not corrupted:
            everything = replace(everything, corruptions=())
        if scale == "smoke":
            few = ("gaussian_noise", "contrast") if corrupted else ()
            return replace(everything, examples=100, corruptions=few, severities=(1, 5), maps=min(maps, 20))
        small = replace(everything, examples=self.laptop_examples, corrupted_examples=1_000)
        return small if scale == "laptop" else everything


def _width(recipe: Recipe) -> int:
    """As a factor of the paper's; ImageNet's networks count as its usual ones for CIFAR, WRN-16-4."""
    if isinstance(recipe.model, WideResNetConfig):
        return recipe.model.width
    return 4 if isinstance(recipe.model, ResNetConfig) else 2
