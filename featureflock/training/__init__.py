"""Training: recipes, the loop, checkpoints, progress."""

from featureflock.training.compute import ComputeConfig
from featureflock.training.loop import train
from featureflock.training.recipe import Recipe
from featureflock.training.recipes import RECIPES
from featureflock.training.reporters import (
    LineReporter,
    ProgressBarReporter,
    Reporter,
    ReporterGroup,
    TensorBoardReporter,
)
from featureflock.training.signals import TrainingInterrupted
from featureflock.training.validation import DivergenceError

__all__ = ["RECIPES", "ComputeConfig", "DivergenceError", "Recipe", "TrainingInterrupted", "train"]
__all__ += ["LineReporter", "ProgressBarReporter", "Reporter", "ReporterGroup", "TensorBoardReporter"]
