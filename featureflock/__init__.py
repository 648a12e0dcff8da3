"""featureflock: ensembles of neural networks whose members are kept apart in feature space."""

from featureflock import methods, models
from featureflock.ensemble import Ensemble, Uncertainty
from featureflock.kernels import RBF
from featureflock.particles import ParticleLayer, transport
from featureflock.priors import Cauchy, Normal, Uniform
from featureflock.rules import MAP, SVGD, WGD, SteinWGD
from featureflock.saving import load, save
from featureflock.version import __version__

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
    "load",
    "methods",
    "models",
    "save",
    "transport",
]
