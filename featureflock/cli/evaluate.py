"""featureflock evaluate: all metrics of trained runs, and how they compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from featureflock.cli.terminal import make_console, progress_bar
from featureflock.evaluation import Evaluation, EvaluationProtocol, evaluate_runs
from featureflock.report import terminal_tables, write_tables
from featureflock.training import ComputeConfig
from featureflock.utils.files import check_folder


@dataclass(frozen=True)
class Request:
    """What to evaluate: the flags that evaluate and report have in common."""

    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN …"), tyro.conf.Positional]
    """Folders that `featureflock train` made: methods × seeds of one data set."""
    protocol: Annotated[EvaluationProtocol, tyro.conf.arg(name="")] = EvaluationProtocol()
    """What to test on."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True)
class Options(Request):
    """Measure trained runs on the clean test set, its 15 corruptions × 5 severities, and out-of-distribution inputs.

    Runs that differ by their seed alone are averaged, and differences from Deep Ensembles are paired by seed. Each
    member's predictions are kept in RUN/predictions: what is there is not computed again, and an interrupted evaluation
    goes on by the same command.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("featureflock-evaluation")
    """Folder for results.json, table.md and table.tex."""


def main(args: list[str]) -> None:
    """Run `featureflock evaluate` with these arguments."""
    options = tyro.cli(Options, prog="featureflock evaluate", args=args)
    console = make_console()
    check_folder(options.out)
    evaluation = carry_out(options, console)
    show(evaluation, console)
    for path in write_tables(evaluation.results, evaluation.images, options.out):
        console.print(f"wrote {path}", soft_wrap=True)


def carry_out(request: Request, console: Console) -> Evaluation:
    """Evaluate, with a progress bar."""
    if not request.runs:
        raise ValueError("Say which runs: the folders that `featureflock train` made, such as runs/*.")
    with progress_bar(console, "examples") as progress:
        return evaluate_runs(
            request.runs,
            request.protocol,
            compute=ComputeConfig(device=request.device),
            progress=progress,
            log=lambda text: console.print(text, soft_wrap=True),
        )


def show(evaluation: Evaluation, console: Console) -> None:
    for table in terminal_tables(evaluation.results):
        console.print(table)
