"""featureflock: ensembles of neural networks whose members are kept apart in feature space.

Names are imported when they are first asked for, so that `import featureflock` and `featureflock --help` take no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from featureflock.version import __version__

__all__ = [
    "MAP",
    "RBF",
    "SVGD",
    "WGD",
    "Cauchy",
    "Ensemble",
    "MeshShape",
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
    "joined",
    "load",
    "methods",
    "models",
    "save",
    "training",
    "transport",
]

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers and editors
    from featureflock import corruptions, data, evaluation, methods, models, training
    from featureflock.distributed import MeshShape, joined
    from featureflock.ensemble import Ensemble, Uncertainty
    from featureflock.evaluation import calibrate
    from featureflock.kernels import RBF
    from featureflock.particles import ParticleLayer, transport
    from featureflock.priors import Cauchy, Normal, Uniform
    from featureflock.rules import MAP, SVGD, WGD, SteinWGD
    from featureflock.saving import load, save
else:
    _MODULES = ("corruptions", "data", "evaluation", "methods", "models", "training")
    _HOMES = {
        "Cauchy": "priors",
        "Ensemble": "ensemble",
        "MAP": "rules",
        "MeshShape": "distributed",
        "Normal": "priors",
        "ParticleLayer": "particles",
        "RBF": "kernels",
        "SVGD": "rules",
        "SteinWGD": "rules",
        "Uncertainty": "ensemble",
        "Uniform": "priors",
        "WGD": "rules",
        "calibrate": "evaluation",
        "joined": "distributed",
        "load": "saving",
        "save": "saving",
        "transport": "particles",
    }

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"featureflock.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'featureflock' has no attribute {name!r}")
        found = getattr(importlib.import_module(f"featureflock.{_HOMES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
