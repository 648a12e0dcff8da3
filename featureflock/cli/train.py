"""featureflock train: a named recipe, any of whose fields can be changed by a flag of the same name."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.table import Table

from featureflock import methods
from featureflock.cli.recipe_flags import Field, component_name, read_flags
from featureflock.cli.terminal import make_console
from featureflock.distributed.env import is_rank_zero
from featureflock.distributed.failures import AlreadyReported
from featureflock.training import (
    RECIPES,
    LineReporter,
    ProgressBarReporter,
    Recipe,
    Reporter,
    ReporterGroup,
    TensorBoardReporter,
    train,
)
from featureflock.training.launch import best_processes, launch
from featureflock.training.reporters import has_tensorboard

_OUT: Field = (
    "out",
    Annotated[
        Path | None, tyro.conf.arg(help="Folder of the run. By default runs/RECIPE-METHOD-seedSEED.", metavar="FOLDER")
    ],
    dataclasses.field(default=None),
)
_RESUME: Field = (
    "resume",
    Annotated[bool, tyro.conf.arg(help="Go on with the run in that folder, from its last checkpoint.")],
    dataclasses.field(default=False),
)


def main(args: list[str]) -> None:
    """Run `featureflock train` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        _list_recipes()
        return
    with _said_once():
        name, options = read_flags("train", args, "", _OUT, _RESUME)
    processes = best_processes(options.recipe, options.compute)
    if processes > 1:
        launch(processes, ["train", *args, "--mesh.members", str(processes)])
    else:
        _run(name, args[1:], options)


@contextmanager
def _said_once() -> Iterator[None]:
    """What is wrong with the flags is wrong in all processes, and one of them says so."""
    if is_rank_zero():
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        try:
            yield
        except ValueError:
            raise AlreadyReported(1) from None


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


def _run(name: str, flags: list[str], options: Any) -> None:
    recipe: Recipe = options.recipe
    out = options.out or Path("runs") / f"{name}-{component_name(recipe, 'method')}-seed{recipe.seed}"
    console = make_console()
    shown: list[Reporter] = [ProgressBarReporter(console) if console.is_terminal else LineReporter(console)]
    if has_tensorboard() and is_rank_zero():
        shown.append(TensorBoardReporter(out / "tensorboard"))
    plan = f"{component_name(recipe, 'method')}, members: {recipe.size}, epochs: {recipe.epochs}"
    console.print(f"{name}: {plan}, in {out}", soft_wrap=True)
    result = train(recipe, out, compute=options.compute, resume=options.resume, reporter=ReporterGroup(*shown))
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
