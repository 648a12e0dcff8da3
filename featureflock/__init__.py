"""featureflock: ensembles of neural networks whose members are kept apart in feature space.

Names are imported on first access, so that `import featureflock` and `featureflock --help` are fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from featureflock.version import __version__

__all__ = ["MAP", "RBF", "SVGD", "WGD", "Cauchy", "Normal", "SteinWGD", "Uniform", "transport"]
__all__ += ["ParticleLayer", "particle_loss"]
__all__ += [
    "Ensemble",
    "MeshShape",
    "MicroBatches",
    "Uncertainty",
    "__version__",
    "calibrate",
    "join_mesh",
    "load",
    "save",
]
__all__ += ["export", "lora", "rank_one", "report", "tune"]
__all__ += ["corruptions", "data", "evaluate", "evaluation", "integrations", "methods", "models"]
__all__ += ["studies", "tasks", "training"]

if TYPE_CHECKING:  # the names of `__getattr__`, for type checkers and editors
    from featureflock import corruptions, data, evaluation, integrations, methods, models, studies, tasks, training
    from featureflock.core import MAP, RBF, SVGD, WGD, Cauchy, Normal, SteinWGD, Uniform, transport
    from featureflock.core.layer import ParticleLayer, particle_loss
    from featureflock.distributed.mesh import join_mesh
    from featureflock.distributed.shape import MeshShape
    from featureflock.ensemble import Ensemble, MicroBatches, load, lora, rank_one, save
    from featureflock.evaluation import calibrate, evaluate
    from featureflock.integrations.export import export
    from featureflock.reports import report
    from featureflock.studies import tune
    from featureflock.tasks import Uncertainty
else:
    _NAMES = {
        "core": "MAP RBF SVGD WGD Cauchy Normal SteinWGD Uniform transport",
        "core.layer": "ParticleLayer particle_loss",
        "distributed.mesh": "join_mesh",
        "distributed.shape": "MeshShape",
        "ensemble": "Ensemble MicroBatches load lora rank_one save",
        "evaluation": "calibrate evaluate",
        "integrations.export": "export",
        "reports": "report",
        "studies": "tune",
        "tasks": "Uncertainty",
    }
    _HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'featureflock' has no attribute {name!r}")
        module = importlib.import_module(f"featureflock.{_HOMES.get(name, name)}")
        globals()[name] = value = getattr(module, name) if name in _HOMES else module
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
