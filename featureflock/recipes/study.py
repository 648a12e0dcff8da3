"""A table or figure of the paper as a study: rows that differ in what it is about, and the paper's numbers.

A row's recipe is the paper's. Two functions make it smaller:

    smoke     embedded digits and a few filters, to see in seconds that all of it runs
    laptop    real CIFAR-10 and small networks, for hours on two cores
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from featureflock.data import CIFAR10, Digits
from featureflock.evaluation import Protocol
from featureflock.models import CNN, WRN
from featureflock.training import Recipe

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
    """WRN-10 a quarter as wide, half of the members, 10,000 pictures of CIFAR-10, 8 epochs."""
    return replace(
        recipe,
        data=CIFAR10(),
        model=WRN(10, max(1, _width(recipe) // 4)),
        members=max(recipe.size // 2, min(recipe.size, 2)),
        subset=10_000,
        epochs=8,
        decay_epochs=(5, 7),
        batch=128,
        weight_decay=5e-4,
    )


def smoke(recipe: Recipe) -> Recipe:
    """A network of a few filters, up to 4 members, 200 digits, 2 epochs."""
    return replace(
        recipe,
        data=Digits(),
        model=CNN(_width(recipe)),
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
    laptop_examples: int | None = 2_000
    """Test examples of a laptop; None for all."""

    def recipe(self, row: Row, scale: Scale, seed: int) -> Recipe:
        small = {"smoke": self.smoke, "laptop": self.laptop}
        return replace(small[scale](row.recipe) if scale in small else row.recipe, seed=seed)

    def seeds_at(self, scale: Scale) -> int:
        return {"smoke": 2, "laptop": 3, "paper": self.seeds}[scale]

    def protocol(self, scale: Scale) -> Protocol:
        """What it is measured on: at smaller scales some of the test pictures."""
        corrupted = any(column.startswith("corrupted") for column in self.columns)
        maps = 500 if any("map" in column for column in self.columns) else 0
        everything = Protocol(maps=maps, unfamiliar=())
        if not corrupted:
            everything = replace(everything, corruptions=())
        if scale == "smoke":
            few = ("gaussian_noise", "contrast") if corrupted else ()
            return replace(everything, examples=100, corruptions=few, severities=(1, 5), maps=min(maps, 20))
        return replace(everything, examples=self.laptop_examples) if scale == "laptop" else everything


def _width(recipe: Recipe) -> int:
    return recipe.model.width if isinstance(recipe.model, WRN) else 2
