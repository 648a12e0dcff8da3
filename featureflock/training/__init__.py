"""Training: recipes, the loop, checkpoints, progress."""

from featureflock.training.compute import ComputeConfig, ResolvedCompute
from featureflock.training.loop import train
from featureflock.training.recipe import Recipe
from featureflock.training.recipes import RECIPES, NamedRecipe
from featureflock.training.reporters import (
    LineReporter,
    ProgressBarReporter,
    Reporter,
    ReporterGroup,
    TensorBoardReporter,
)
from featureflock.training.signals import TrainingInterrupted
from featureflock.training.validation import DivergenceError

__all__ = [
    "RECIPES",
    "ComputeConfig",
    "DivergenceError",
    "LineReporter",
    "NamedRecipe",
    "ProgressBarReporter",
    "Recipe",
    "Reporter",
    "ReporterGroup",
    "ResolvedCompute",
    "TensorBoardReporter",
    "TrainingInterrupted",
    "train",
]
