"""The ensemble module, the execution of its members, sharing of weights, and saving."""

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import Execution
from featureflock.ensemble.inputs import MicroBatches
from featureflock.ensemble.saving import load, save
from featureflock.ensemble.sharing import SharedMembers, lora, rank_one

__all__ = ["Ensemble", "Execution", "MicroBatches", "SharedMembers", "load", "lora", "rank_one", "save"]
