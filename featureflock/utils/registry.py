"""Registries of named components, and the plug-ins that extend them.

    @METHODS.register("my-method")
    @dataclass(frozen=True)
    class MyMethod(Method): ...

Everything that lists components reads the registry: the command line, recipes, costs, tables and docs. Modules named in
the environment variable FEATUREFLOCK_PLUGINS (separated by commas) are imported by every command, so user-defined
components can be used like built-in ones.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from featureflock.utils.suggestions import unknown_name

T = TypeVar("T")
C = TypeVar("C")

PLUGINS = "FEATUREFLOCK_PLUGINS"


class Registry(Mapping[str, T], Generic[T]):
    """Components of one kind by name, in the order of registration.

    Args:
        kind: noun for a component in error messages, such as "method".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator that adds a component under `name`."""

        def add(component: C) -> C:
            self.add(name, component)  # type: ignore[arg-type]
            return component

        return add

    def add(self, name: str, component: T) -> None:
        """Add a component under `name`, which must not be in use."""
        if name in self._entries and self._entries[name] is not component:
            raise ValueError(f"There is already a {self.kind} called {name!r}; choose another name.")
        self._entries[name] = component

    def name_of(self, component: object) -> str | None:
        """Return the name of a component, or of the class of an instance; None if it is not registered."""
        return next((n for n, entry in self._entries.items() if entry is component or entry is type(component)), None)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def get(self, name: str, default: T | None = None) -> T | None:  # type: ignore[override]
        """Return a component, or the default if there is none of that name."""
        return self._entries.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def import_submodules(package: str, path: list[str]) -> None:
    """Import every module of a package, so that each one registers its components."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")


def load_plugins() -> None:
    """Import the modules named in FEATUREFLOCK_PLUGINS."""
    for name in filter(None, (part.strip() for part in os.environ.get(PLUGINS, "").split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"The plug-in {name} named in {PLUGINS} cannot be imported: {error}") from error
