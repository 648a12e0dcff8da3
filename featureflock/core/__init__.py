"""The mathematics on plain tensors: priors, kernels, update rules, transport, and the particle layer."""

from featureflock.core.kernels import KERNELS, RBF, Kernel
from featureflock.core.layer import ParticleLayer, particle_loss
from featureflock.core.priors import PRIORS, Cauchy, Normal, Prior, Uniform
from featureflock.core.rules import MAP, RULES, SVGD, WGD, Rule, SteinWGD
from featureflock.core.transport import NonFiniteError, Subspace, transport

__all__ = [
    "KERNELS",
    "MAP",
    "PRIORS",
    "RBF",
    "RULES",
    "SVGD",
    "WGD",
    "Cauchy",
    "Kernel",
    "NonFiniteError",
    "Normal",
    "ParticleLayer",
    "Prior",
    "Rule",
    "SteinWGD",
    "Subspace",
    "Uniform",
    "particle_loss",
    "transport",
]
