"""featureflock evaluate: measure and compare trained runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from featureflock.cli.terminal import make_console, progress_bar
from featureflock.evaluation import Evaluation, EvaluationProtocol, evaluate_runs
from featureflock.reports import terminal_tables, write_tables
from featureflock.training import ComputeConfig
from featureflock.utils.files import check_folder


@dataclass(frozen=True)
class Request:
    """Flags that evaluate and report have in common."""

    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN …"), tyro.conf.Positional]
    """Run folders, as made by `featureflock train`: methods × seeds of one data set."""
    protocol: Annotated[EvaluationProtocol, tyro.conf.arg(name="")] = EvaluationProtocol()
    """Choice of the test sets."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True)
class Options(Request):
    """Evaluate trained runs on the clean test set, its 15 corruptions × 5 severities, and out-of-distribution inputs.

    Runs that differ in their seed alone are averaged, and differences vs Deep Ensembles are paired by seed. Predictions
    are cached in RUN/predictions, so nothing is computed twice, and the same command resumes an interrupted evaluation.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("featureflock-evaluation")
    """Folder for results.json, table.md, table.tex and images/."""


def main(args: list[str]) -> None:
    """Run `featureflock evaluate` with these arguments."""
    options = tyro.cli(Options, prog="featureflock evaluate", args=args)
    console = make_console()
    check_folder(options.out)
    evaluation = run_evaluation(options, console)
    paths = write_tables(evaluation.results, evaluation.images, options.out)
    print_tables(evaluation, console)
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)


def run_evaluation(request: Request, console: Console) -> Evaluation:
    """Evaluate, with a progress bar."""
    if not request.runs:
        raise ValueError("Give at least one run: a folder that `featureflock train` made, such as runs/*.")
    compute, log = ComputeConfig(device=request.device), partial(console.print, soft_wrap=True)
    with progress_bar(console, "examples") as progress:
        return evaluate_runs(request.runs, request.protocol, compute=compute, progress=progress, log=log)


def print_tables(evaluation: Evaluation, console: Console) -> None:
    """Print the comparison."""
    for table in terminal_tables(evaluation.results):
        console.print(table)
