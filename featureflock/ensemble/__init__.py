"""The ensemble module, how its members are executed, and how it is saved."""

from featureflock.ensemble.ensemble import Ensemble, Uncertainty

__all__ = ["Ensemble", "Uncertainty"]
