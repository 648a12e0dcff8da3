"""featureflock: ensembles of neural networks whose members are kept apart in feature space."""

import importlib
from typing import TYPE_CHECKING, Any

from featureflock import methods, models
from featureflock.ensemble import Ensemble, Uncertainty
from featureflock.kernels import RBF
from featureflock.particles import ParticleLayer, transport
from featureflock.priors import Cauchy, Normal, Uniform
from featureflock.rules import MAP, SVGD, WGD, SteinWGD
from featureflock.saving import load, save
from featureflock.version import __version__

if TYPE_CHECKING:
    from featureflock import corruptions, data, evaluation, training
    from featureflock.evaluation import calibrate

__all__ = [
    "MAP",
    "RBF",
    "SVGD",
    "WGD",
    "Cauchy",
    "Ensemble",
    "Normal",
    "ParticleLayer",
    "SteinWGD",
    "Uncertainty",
    "Uniform",
    "__version__",
    "calibrate",
    "corruptions",
    "data",
    "evaluation",
    "load",
    "methods",
    "models",
    "save",
    "training",
    "transport",
]


def __getattr__(name: str) -> Any:
    """What takes time to import is imported when it is asked for."""
    if name == "calibrate":
        return importlib.import_module("featureflock.evaluation").calibrate
    if name in ("corruptions", "data", "evaluation", "training"):
        return importlib.import_module(f"featureflock.{name}")
    raise AttributeError(f"module 'featureflock' has no attribute {name!r}")
