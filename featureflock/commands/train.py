"""featureflock train: a named recipe, any of whose fields can be changed by a flag of the same name."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table

from featureflock import methods, models, priors, rules
from featureflock.commands.terminal import make_console
from featureflock.contact import Elsewhere
from featureflock.data import CIFAR10, CIFAR100, MNIST, Digits, Dominoes, FashionMNIST, ImageFolder
from featureflock.hints import unknown
from featureflock.launched import is_first
from featureflock.training import RECIPES, Bar, Board, Engine, Lines, Recipe, Reporter, Several, train
from featureflock.training.launching import best_processes, launch
from featureflock.training.progress import has_tensorboard

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
        "wrn": models.WRN,
        "resnet-cifar": models.ResNetCIFAR,
        "resnet-imagenet": models.ResNetImageNet,
        "mlp": models.MLP,
        "cnn": models.CNN,
        "fast-cnn": models.FastCNN,
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


def main(args: list[str]) -> None:
    """Run `featureflock train` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        _list_recipes()
        return
    name, flags = args[0], args[1:]
    if name.startswith("-"):
        raise ValueError(
            "Say which recipe first: featureflock train NAME [FLAGS]; featureflock train --help lists them."
        )
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES, otherwise="featureflock train --help lists them.")
    with _said_once():
        recipe = _with_chosen_parts(RECIPES[name].recipe, flags)
        options: Any = tyro.cli(
            _options(recipe),
            prog=f"featureflock train {name}",
            description=f"{RECIPES[name].what} Every field of the recipe is a flag.",
            config=(tyro.conf.AvoidSubcommands,),
            args=flags,
        )
    processes = best_processes(options.recipe, options.engine)
    if processes > 1:
        launch(processes, ["train", *args, "--mesh.members", str(processes)])
    else:
        _run(name, flags, options)


@contextmanager
def _said_once() -> Iterator[None]:
    """What is wrong with the flags is wrong in all processes, and one of them says so."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        try:
            yield
        except ValueError:
            raise Elsewhere(1) from None


def _list_recipes() -> None:
    console = make_console()
    console.print("usage: featureflock train NAME [FLAGS]\n\nTrains an ensemble by a recipe, resumable to the bit.")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("NAME", no_wrap=True)
    table.add_column("what")
    for name, entry in RECIPES.items():
        table.add_row(name, entry.what)
    console.print(table)
    console.print(
        "\nfeatureflock train NAME --help shows the recipe's fields, each a flag. For instance:\n"
        "  featureflock train digits\n"
        "  featureflock train cifar10-small --method deep-ensembles --seed 1\n"
        "  featureflock train cifar10-wrn16x4 --members 5 --epochs 20 --method.rank 4",
        soft_wrap=True,
    )


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


def _to_compare(name: str, flags: list[str], method: str) -> str:
    """The command for the same with another method, and so without what was said of this one, and in another folder."""
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            flag = word.removeprefix("--").split("=")[0]
            dropping = flag.split(".")[0] in ("method", "mesh", "out", "resume")
        if not dropping:
            kept.append(word)
    return shlex.join(["featureflock", "train", name, *kept, "--method", method])


def _options(recipe: Recipe) -> type:
    """A dataclass of all flags: the fields of recipe and engine, what parts there are to choose, and the folder."""
    fields: list[tuple[str, Any, Any]] = [
        ("recipe", Annotated[Recipe, tyro.conf.arg(name="")], dataclasses.field(default=recipe)),
        ("engine", Annotated[Engine, tyro.conf.arg(name="")], dataclasses.field(default=Engine())),
    ]
    for path, choices in PARTS.items():
        current = _current(recipe, path)
        if current is not None:
            help_text = f"Which {path.split('.')[-1]}."
            annotation = Annotated[Literal[tuple(choices)], tyro.conf.arg(name=path, help=help_text)]  # type: ignore[valid-type]
            fields.append((path.replace(".", "_") + "_name", annotation, dataclasses.field(default=current)))
    out = Annotated[
        Path | None, tyro.conf.arg(help="Folder of the run. By default runs/RECIPE-METHOD-seedSEED.", metavar="FOLDER")
    ]
    resume = Annotated[bool, tyro.conf.arg(help="Go on with the run in that folder, from its last checkpoint.")]
    fields += [("out", out, dataclasses.field(default=None)), ("resume", resume, dataclasses.field(default=False))]
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def _current(recipe: Recipe, path: str) -> str | None:
    """The name of the part that the recipe has; None if it has no such part."""
    part: Any = recipe
    for field in path.split("."):
        part = getattr(part, field, None)
    return next((name for name, kind in PARTS[path].items() if type(part) is kind), None)


def _run(name: str, flags: list[str], options: Any) -> None:
    recipe: Recipe = options.recipe
    out = options.out or Path("runs") / f"{name}-{_current(recipe, 'method')}-seed{recipe.seed}"
    console = make_console()
    shown: list[Reporter] = [Bar(console) if console.is_terminal else Lines(console)]
    if has_tensorboard() and is_first():
        shown.append(Board(out / "tensorboard"))
    plan = f"{_current(recipe, 'method')}, members: {recipe.size}, epochs: {recipe.epochs}"
    console.print(f"{name}: {plan}, in {out}", soft_wrap=True)
    result = train(recipe, out, engine=options.engine, resume=options.resume, reporter=Several(*shown))
    test = result["test"]
    lines = [
        f"Test: {test['accuracy']:.2f} % correct, NLL {test['nll']:.4f}; members "
        f"{', '.join(f'{a:.1f}' for a in test['member_accuracy'])} %.",
        f"  {out}/ensemble        the trained ensemble: featureflock.load({str(out / 'ensemble')!r})",
        f"  {out}/metrics.jsonl   a line an epoch",
        f"  {out}/result.json, recipe.json, environment.json, checkpoints",
    ]
    if has_tensorboard():
        lines.append(f"  tensorboard --logdir {shlex.quote(str(out.parent))}   shows the curves")
    other = "feature-wgd" if isinstance(recipe.method, methods.DeepEnsembles) else "deep-ensembles"
    lines.append(f"Next, to compare: {_to_compare(name, flags, other)}")
    console.print("\n".join(lines), soft_wrap=True)
