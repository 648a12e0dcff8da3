"""Ensembles in the interfaces of other libraries; each is imported on first access.

from featureflock.integrations import FlockClassifier, FlockRegressor      # scikit-learn
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["FlockClassifier", "FlockRegressor"]

if TYPE_CHECKING:
    from featureflock.integrations.sklearn import FlockClassifier, FlockRegressor
else:
    _HOMES = {"FlockClassifier": "sklearn", "FlockRegressor": "sklearn"}

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'featureflock.integrations' has no attribute {name!r}")
        module = importlib.import_module(f"featureflock.integrations.{_HOMES[name]}")
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
