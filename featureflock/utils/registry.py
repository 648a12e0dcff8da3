"""Registries of named components, and the plug-ins that extend them.

    @METHODS.register("my-method")
    @dataclass(frozen=True)
    class MyMethod(Method): ...

The command line, recipes, tables and docs list the components of a registry. Every command imports the modules named in
the environment variable FEATUREFLOCK_PLUGINS (separated by commas), which can register user-defined components.
Python's path and then the current folder are searched for them.
"""

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
C = TypeVar("C")

PLUGINS = "FEATUREFLOCK_PLUGINS"


class Registry(dict[str, T]):
    """Components of one kind by name, in the order of registration. `kind` is a noun such as "method"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator that adds a component under `name`."""

        def add(component: C) -> C:
            self.add(name, component)  # type: ignore[arg-type]
            return component

        return add

    def add(self, name: str, component: T) -> None:
        """Add a component. Neither `name` nor the name of its class, which recipes store, may be in use."""
        classes = {entry.__name__: entry for entry in self.values() if isinstance(entry, type)}
        if isinstance(component, type) and classes.get(component.__name__, component) is not component:
            raise ValueError(f"There is already a {self.kind} of class {component.__name__}; rename the class.")
        if self.setdefault(name, component) is not component:
            raise ValueError(f"There is already a {self.kind} called {name!r}; choose another name.")

    def name_of(self, component: object) -> str | None:
        """Return the name of a component, or of the class of an instance; None if it is not registered."""
        return next((n for n, entry in self.items() if entry is component or entry is type(component)), None)

    def __missing__(self, name: str) -> T:
        raise unknown_name(self.kind, name, self)


def unknown_name(what: str, name: str, choices: Collection[str], otherwise: str = "") -> ValueError:
    """Return an error that suggests the closest choice; if none is close, `otherwise`, or a list of all choices."""
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]}?" if close else otherwise or f"choose from {', '.join(choices)}."
    return ValueError(f"There is no {what} {name!r}; {hint}")


def import_submodules(package: str, path: list[str]) -> None:
    """Import every module of a package, so that each one registers its components."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")


def load_plugins() -> None:
    """Import the modules named in FEATUREFLOCK_PLUGINS."""
    names = os.environ.get(PLUGINS, "").replace(",", " ").split()
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            kind = "" if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"The plug-in {name} named in {PLUGINS} cannot be imported: {kind}{error}") from error
