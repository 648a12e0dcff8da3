"""Ensembles in the interfaces of other libraries; each is imported on first access.

from featureflock.integrations import FlockClassifier, FlockRegressor      # scikit-learn
from featureflock.integrations import FlockModule                          # Lightning
from featureflock.integrations import FlockModel                           # transformers, accelerate
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["FlockClassifier", "FlockModel", "FlockModule", "FlockRegressor"]

if TYPE_CHECKING:
    from featureflock.integrations.lightning import FlockModule
    from featureflock.integrations.sklearn import FlockClassifier, FlockRegressor
    from featureflock.integrations.transformers import FlockModel
else:
    _HOMES = {
        "FlockClassifier": "sklearn",
        "FlockModel": "transformers",
        "FlockModule": "lightning",
        "FlockRegressor": "sklearn",
    }

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'featureflock.integrations' has no attribute {name!r}")
        module = importlib.import_module(f"featureflock.integrations.{_HOMES[name]}")
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
