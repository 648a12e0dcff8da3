"""The training engine: recipes, the loop, checkpoints, progress."""

from featureflock.training.engine import Engine, Setup
from featureflock.training.interrupts import Stopped
from featureflock.training.loop import train
from featureflock.training.measuring import Diverged
from featureflock.training.progress import Bar, Board, Lines, Reporter, Several
from featureflock.training.recipe import Recipe
from featureflock.training.recipes import RECIPES, NamedRecipe

__all__ = [
    "RECIPES",
    "Bar",
    "Board",
    "Diverged",
    "Engine",
    "Lines",
    "NamedRecipe",
    "Recipe",
    "Reporter",
    "Setup",
    "Several",
    "Stopped",
    "train",
]
