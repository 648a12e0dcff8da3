"""A named recipe, any of whose fields can be changed by a flag of the same name."""

import dataclasses
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import tyro

from featureflock import methods, models
from featureflock.core import priors, rules
from featureflock.data import CIFAR10, CIFAR100, MNIST, Digits, Dominoes, FashionMNIST, ImageFolder
from featureflock.training import RECIPES, ComputeConfig, Recipe
from featureflock.utils.suggestions import unknown_name

Field = tuple[str, Any, Any]
"""Of a dataclass to be made: name, annotation, field."""

# What a flag that names a part can choose. Its own fields are then flags too: --method feature-wgd --method.rank 4.
PARTS: dict[str, dict[str, type]] = {
    "data": {
        "digits": Digits,
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "mnist": MNIST,
        "fashion-mnist": FashionMNIST,
        "dominoes": Dominoes,
        "image-folder": ImageFolder,
    },
    "model": {
        "wrn": models.WideResNetConfig,
        "resnet-cifar": models.CifarResNetConfig,
        "resnet-imagenet": models.ResNetConfig,
        "mlp": models.MLPConfig,
        "cnn": models.CNNConfig,
        "fast-cnn": models.FastCNNConfig,
    },
    "method": {
        "single": methods.Single,
        "deep-ensembles": methods.DeepEnsembles,
        "feature-wgd": methods.FeatureWGD,
        "function-wgd": methods.FunctionWGD,
        "weight-wgd": methods.WeightWGD,
        "feature-map": methods.FeatureMAP,
        "adp": methods.ADP,
        "dice": methods.DICE,
    },
    "method.prior": {"cauchy": priors.Cauchy, "normal": priors.Normal, "uniform": priors.Uniform},
    "method.rule": {"wgd": rules.WGD, "svgd": rules.SVGD, "stein-wgd": rules.SteinWGD, "map": rules.MAP},
}


def read_flags(command: str, args: list[str], what: str, *own: Field) -> tuple[str, Any]:
    """The recipe's name, and all flags: `recipe`, `engine`, and what else the command has.

    Args:
        command: such as train.
        args: the recipe's name and the flags.
        what: the command does, for its help.
        own: fields of the command itself.
    """
    name, flags = args[0], args[1:]
    if name.startswith("-"):
        raise ValueError(
            f"Say which recipe first: featureflock {command} NAME [FLAGS]; featureflock train --help lists them."
        )
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES, otherwise="featureflock train --help lists them.")
    recipe = _with_chosen_parts(RECIPES[name].recipe, flags)
    options: Any = tyro.cli(
        _options(recipe, own),
        prog=f"featureflock {command} {name}",
        description=f"{RECIPES[name].what} {what}Every field of the recipe is a flag.",
        config=(tyro.conf.AvoidSubcommands,),
        args=flags,
    )
    return name, options


def _with_chosen_parts(recipe: Recipe, flags: list[str]) -> Recipe:
    """The recipe with the parts that flags name, so that their fields can become flags; tyro checks the rest."""
    for path, choices in PARTS.items():
        chosen = choices.get(_value_of(f"--{path}", flags) or "")
        if chosen is None:
            continue
        if path in ("data", "model", "method"):
            if not isinstance(getattr(recipe, path), chosen):
                recipe = replace(recipe, **{path: chosen()})
        else:
            field = path.removeprefix("method.")
            if field not in (f.name for f in dataclasses.fields(recipe.method)):  # type: ignore[arg-type]
                raise ValueError(f"{type(recipe.method).__name__} has no {field} to choose; leave --{path} out.")
            if not isinstance(getattr(recipe.method, field), chosen):
                recipe = replace(recipe, method=replace(recipe.method, **{field: chosen()}))  # type: ignore[type-var]
    if isinstance(recipe.method, methods.Single) and recipe.members is not None:
        recipe = replace(recipe, members=1)
    return recipe


def _value_of(flag: str, flags: list[str]) -> str | None:
    """The value of a flag, the last one if it is given twice."""
    value = None
    for word, following in pairwise([*flags, None]):
        if word == flag:
            value = following
        elif word is not None and word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def _options(recipe: Recipe, own: tuple[Field, ...]) -> type:
    """A dataclass of all flags: the fields of recipe and engine, what parts there are to choose, and the command's."""
    fields: list[Field] = [
        ("recipe", Annotated[Recipe, tyro.conf.arg(name="")], dataclasses.field(default=recipe)),
        ("engine", Annotated[ComputeConfig, tyro.conf.arg(name="")], dataclasses.field(default=ComputeConfig())),
    ]
    for path, choices in PARTS.items():
        current = name_of_part(recipe, path)
        if current is not None:
            help_text = f"Which {path.split('.')[-1]}."
            annotation = Annotated[Literal[tuple(choices)], tyro.conf.arg(name=path, help=help_text)]  # type: ignore[valid-type]
            fields.append((path.replace(".", "_") + "_name", annotation, dataclasses.field(default=current)))
    fields += own
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def name_of_part(recipe: Recipe, path: str) -> str | None:
    """The name of the part that the recipe has; None if it has no such part."""
    part: Any = recipe
    for field in path.split("."):
        part = getattr(part, field, None)
    return next((name for name, kind in PARTS[path].items() if type(part) is kind), None)
