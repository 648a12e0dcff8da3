"""The ensemble module, the execution of its members, and saving."""

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import Execution
from featureflock.ensemble.saving import load, save

__all__ = ["Ensemble", "Execution", "load", "save"]
