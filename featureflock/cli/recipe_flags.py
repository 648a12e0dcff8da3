"""Command-line flags of a named recipe: one flag for each field, including the fields of its components."""

import dataclasses
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import tyro

from featureflock.core import KERNELS, PRIORS, RULES
from featureflock.data import DATA_SETS, HeldOut
from featureflock.methods import METHODS, Single
from featureflock.models import MODELS
from featureflock.models.sharing import SharingConfig
from featureflock.training import RECIPES, ComputeConfig, Recipe
from featureflock.utils.registry import unknown_name

Field = tuple[str, Any, Any]
"""Name, annotation and dataclasses.field of a flag."""

COMPONENTS: dict[str, Mapping[str, type]] = {
    "data": DATA_SETS,
    "model": MODELS,
    "model.base": MODELS,
    "method": METHODS,
    "method.prior": PRIORS,
    "method.kernel": KERNELS,
    "method.rule": RULES,
}
"""Components that a flag chooses by name. Their fields are flags too: --method feature-wgd --method.rank 4."""
_LISTED = "featureflock train --help lists all recipes."


def read_flags(command: str, args: list[str], what: str, *extra: Field) -> tuple[str, Any]:
    """Return the name of the recipe, the first of `args`, and an object with fields `recipe`, `compute` and `extra`."""
    name, flags = args[0], args[1:]
    if name.startswith("-"):
        raise ValueError(f"The name of a recipe comes first: featureflock {command} NAME [FLAGS]; {_LISTED}")
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES, otherwise=_LISTED)
    recipe = _with_chosen_components(RECIPES[name].recipe, flags)
    options: Any = tyro.cli(
        _options(recipe, extra),
        prog=f"featureflock {command} {name}",
        description=f"{RECIPES[name].description} {what}Every field of the recipe is a flag.",
        config=(tyro.conf.AvoidSubcommands,),
        args=flags,
    )
    return name, options


def train_command(name: str, flags: list[str], without: Collection[str], more: list[str]) -> str:
    """The command that trains a recipe with more flags, and `without` some: "method" stands for --method.rank too."""
    words, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            dropping = word.removeprefix("--").split("=")[0].split(".")[0] in without
        if not dropping:
            words.append(word)
    return shlex.join(["featureflock", "train", name, *words, *more])


def component_name(recipe: Recipe, path: str) -> str | None:
    """Name of a component of a recipe, such as "method.prior"; None if it has none or it is not registered."""
    component: Any = recipe
    for field in path.split("."):
        component = getattr(component, field, None)
    return next((name for name, cls in COMPONENTS[path].items() if type(component) is cls), None)


def _with_chosen_components(recipe: Recipe, flags: list[str]) -> Recipe:
    """Replace the components that flags name, so that the fields of the new ones become flags. Tyro checks the rest."""
    for path, choices in COMPONENTS.items():
        name = _value_of(f"--{path}", flags)
        if name is None or name not in choices:
            continue
        parent, _, field = path.rpartition(".")
        owner: Any = getattr(recipe, parent) if parent else recipe
        if not hasattr(owner, field):
            raise ValueError(f"{type(owner).__name__} has no {field}; leave out --{path}.")
        chosen: Any = choices[name]
        if not _has_defaults(chosen):
            raise ValueError(f"--{path} {name}: {chosen.__name__} must be a dataclass with a default for each field.")
        if not isinstance(getattr(owner, field), chosen):
            wraps = issubclass(chosen, HeldOut | SharingConfig)  # the recipe's data or network
            changed = replace(owner, **{field: chosen(getattr(owner, field)) if wraps else chosen()})
            recipe = replace(recipe, **{parent: changed}) if parent else changed
    if isinstance(recipe.method, Single) and recipe.members is not None:
        recipe = replace(recipe, members=1)
    return recipe


def _has_defaults(cls: Any) -> bool:
    """Whether this is a dataclass that can be built without arguments."""
    missing = dataclasses.MISSING
    return dataclasses.is_dataclass(cls) and not any(
        field.init and field.default is missing and field.default_factory is missing
        for field in dataclasses.fields(cls)
    )


def _value_of(flag: str, flags: list[str]) -> str | None:
    """Value of a flag; the last one if it is given twice."""
    words = [part for word in flags for part in (word.split("=", 1) if word.startswith(f"{flag}=") else [word])]
    return next((value for word, value in reversed(list(pairwise(words))) if word == flag), None)


def _options(recipe: Recipe, extra: tuple[Field, ...]) -> type:
    """Dataclass of all flags: the fields of the recipe and of ComputeConfig, the components, and `extra`."""
    fields: list[Field] = [
        ("recipe", Annotated[Recipe, tyro.conf.arg(name="")], dataclasses.field(default=recipe)),
        ("compute", Annotated[ComputeConfig, tyro.conf.arg(name="")], dataclasses.field(default=ComputeConfig())),
    ]
    for path, choices in COMPONENTS.items():
        current = component_name(recipe, path)
        if current is not None:
            help_text = f"Name of the {path.split('.')[-1].replace('data', 'data set')}; its options are flags too."
            annotation = Annotated[Literal[tuple(choices)], tyro.conf.arg(name=path, help=help_text)]  # type: ignore[valid-type]
            fields.append((path.replace(".", "_") + "_name", annotation, dataclasses.field(default=current)))
    return dataclasses.make_dataclass("Options", [*fields, *extra], frozen=True)
