"""featureflock train: train a named recipe. Every field of the recipe is a flag."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Column, Table

from featureflock.cli.recipe_flags import component_name, read_flags, train_command
from featureflock.cli.terminal import make_console
from featureflock.distributed.env import is_rank_zero
from featureflock.distributed.failures import AlreadyReported
from featureflock.methods import DeepEnsembles
from featureflock.training import RECIPES, LineReporter, ProgressBarReporter, Recipe, Reporter, train
from featureflock.training.reporters import ReporterGroup, RunPlan, TensorBoardReporter, has_tensorboard, score_text


@dataclass(frozen=True)
class RunFlags:
    """Flags of the command itself."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the run. Default: runs/RECIPE-METHOD-seedSEED."""
    resume: bool = False
    """Resume the run in that folder from its last checkpoint."""


def main(args: list[str]) -> None:
    """Run `featureflock train` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        _list_recipes()
        return
    with _errors_on_rank_zero_only():
        extra = ("run", Annotated[RunFlags, tyro.conf.arg(name="")], dataclasses.field(default=RunFlags()))
        name, options = read_flags("train", args, "", extra)
    _run(name, args[1:], options)


@contextmanager
def _errors_on_rank_zero_only() -> Iterator[None]:
    """Wrong flags are wrong in every process; only rank 0 prints the error."""
    if is_rank_zero():
        yield
        return
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            yield
    except ValueError:
        raise AlreadyReported(1) from None


def _list_recipes() -> None:
    console = make_console()
    console.print("usage: featureflock train NAME [FLAGS]\n\nTrain an ensemble with a recipe.")
    table = Table(Column("NAME", no_wrap=True), "description", box=box.SIMPLE_HEAD, show_edge=False)
    for name, entry in RECIPES.items():
        table.add_row(name, entry.description)
    console.print(table)
    console.print(
        "\nfeatureflock train NAME --help lists the fields of a recipe, each of which is a flag. Examples:\n"
        "  featureflock train digits\n"
        "  featureflock train cifar10-small --method deep-ensembles --seed 1\n"
        "  featureflock train cifar10-wrn16x4 --members 5 --epochs 20 --method.rank 4",
        soft_wrap=True,
    )


class _ProcessHint(Reporter):
    """Prints the torchrun command where several processes would train faster."""

    def __init__(self, console: Console, args: list[str]) -> None:
        self.console, self.args = console, args

    def start(self, plan: RunPlan) -> None:
        processes = plan.faster_processes
        if processes > 1:
            threads = torch.get_num_threads() // processes
            launcher = f"OMP_NUM_THREADS={threads} torchrun --nproc-per-node={processes} -m"
            command = shlex.join(["featureflock", "train", *self.args, "--mesh.members", str(processes)])
            self.console.print(f"Hint: {processes} processes would be faster: {launcher} {command}", soft_wrap=True)


def _run(name: str, flags: list[str], options: Any) -> None:
    recipe: Recipe = options.recipe
    method = component_name(recipe, "method")
    out = options.run.out or Path("runs") / f"{name}-{method}-seed{recipe.seed}"
    console = make_console()
    reporters: list[Reporter] = [
        _ProcessHint(console, [name, *flags]),
        ProgressBarReporter(console) if console.is_terminal else LineReporter(console),
    ]
    if has_tensorboard() and is_rank_zero():
        reporters.append(TensorBoardReporter(out / "tensorboard"))
    console.print(f"{name}: {method}, members: {recipe.size}, epochs: {recipe.epochs}, in {out}", soft_wrap=True)
    result = train(recipe, out, compute=options.compute, resume=options.run.resume, reporter=ReporterGroup(*reporters))
    test = result["test"]
    score = "accuracy" if "accuracy" in test else "rmse"
    members = ", ".join(f"{a:.1f}" if score == "accuracy" else f"{a:.4g}" for a in test[f"member_{score}"])
    lines = [
        f"Test {score_text(score, test[score])}, NLL {test['nll']:.4f}; "
        + (f"accuracy of members {members} %." if score == "accuracy" else f"RMSE of members {members}."),
        f"  {out}/ensemble        trained ensemble: featureflock.load({str(out / 'ensemble')!r})",
        f"  {out}/metrics.jsonl   one line per epoch",
        f"  {out}/result.json, recipe.json, environment.json, checkpoints",
    ]
    if has_tensorboard():
        lines.append(f"  tensorboard --logdir {shlex.quote(str(out.parent))}   shows the learning curves")
    else:
        lines.append('  TensorBoard, for learning curves, is not installed: pip install "featureflock[tensorboard]"')
    baseline = "feature-wgd" if isinstance(recipe.method, DeepEnsembles) else "deep-ensembles"
    command = train_command(name, flags, {"method", "mesh", "out", "resume"}, ["--method", baseline])
    lines.append(f"Next, to compare: {command}")
    console.print("\n".join(lines), soft_wrap=True)
