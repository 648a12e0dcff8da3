"""featureflock: ensembles of neural networks whose members are kept apart in feature space.

Names are imported on first access, so that `import featureflock` and `featureflock --help` are fast.
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
    "join_mesh",
    "load",
    "methods",
    "models",
    "save",
    "training",
    "transport",
]

if TYPE_CHECKING:  # the names of `__getattr__`, for type checkers and editors
    from featureflock import corruptions, data, evaluation, methods, models, training
    from featureflock.core.kernels import RBF
    from featureflock.core.layer import ParticleLayer
    from featureflock.core.priors import Cauchy, Normal, Uniform
    from featureflock.core.rules import MAP, SVGD, WGD, SteinWGD
    from featureflock.core.transport import transport
    from featureflock.distributed.mesh import MeshShape, join_mesh
    from featureflock.ensemble.ensemble import Ensemble, Uncertainty
    from featureflock.ensemble.saving import load, save
    from featureflock.evaluation import calibrate
else:
    _MODULES = ("corruptions", "data", "evaluation", "methods", "models", "training")
    _HOMES = {
        "Cauchy": "core.priors",
        "Ensemble": "ensemble.ensemble",
        "MAP": "core.rules",
        "MeshShape": "distributed.mesh",
        "Normal": "core.priors",
        "ParticleLayer": "core.layer",
        "RBF": "core.kernels",
        "SVGD": "core.rules",
        "SteinWGD": "core.rules",
        "Uncertainty": "ensemble.ensemble",
        "Uniform": "core.priors",
        "WGD": "core.rules",
        "calibrate": "evaluation",
        "join_mesh": "distributed.mesh",
        "load": "ensemble.saving",
        "save": "ensemble.saving",
        "transport": "core.transport",
    }

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"featureflock.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'featureflock' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"featureflock.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
