"""featureflock reproduce: tables and figures of the paper, trained, measured, and beside the paper's numbers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from featureflock.cli.terminal import counting, make_console
from featureflock.distributed.env import launched_by_torchrun
from featureflock.report import beside_paper, markdown, terminal_wide, write_report
from featureflock.studies import STUDIES, Scale, Shard, Study, StudyRun, StudyStatus, reproduce, study_runs, to_train
from featureflock.studies.costs import cost, gpu_time
from featureflock.training import ComputeConfig, LineReporter, ProgressBarReporter
from featureflock.utils.files import check_folder, write_atomically
from featureflock.utils.suggestions import unknown_name

_ALL = "all"


@dataclass(frozen=True)
class Options:
    """Train what a table of the paper needs and is not there yet, measure it, and print it beside the paper's numbers.

    Finished runs are never trained again, and an interrupted study goes on by the same command. ImageNet is looked for
    in a folder imagenet where the command is given; a link will do.
    """

    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …"), tyro.conf.Positional] = ()
    """Which tables, one after another, or all; --list says what there is."""
    scale: Scale = "smoke"
    """smoke: embedded digits, in seconds. laptop: small networks on CIFAR-10, in hours. paper: its own, for GPUs."""
    seeds: int | None = None
    """How many seeds; by default 2, 3, or the paper's number."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/K")] = "1/1"
    """Which worker this is of how many that share the folder, on one machine or on many: each begins with its own
    runs, then helps the others."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("reproductions")
    """Where runs and tables are kept."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""
    list: bool = False
    """Which tables there are, and what they cost."""


def main(args: list[str]) -> None:
    """Run `featureflock reproduce` with these arguments."""
    options = tyro.cli(Options, prog="featureflock reproduce", args=args)
    console = make_console()
    if options.list:
        _list(console)
        return
    names = tuple(STUDIES) if options.names == (_ALL,) else options.names
    if not names:
        raise ValueError("Say which study, such as cifar10, or all; featureflock reproduce --list says what there is.")
    for name in names:
        if name not in STUDIES:
            raise unknown_name("study", name, STUDIES, otherwise="featureflock reproduce --list says what there is.")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {options.seeds}.")
    shard, out = Shard.parse(options.shard), options.out / options.scale
    if len(names) > 1:
        together = [cell for name in names for cell in study_runs(STUDIES[name], options.scale, out, options.seeds)]
        _say_what_it_takes(console, f"{len(names)} studies", together)
    for name in names:
        outcome = carry_out(
            console,
            name,
            STUDIES[name],
            options.scale,
            out,
            seeds=options.seeds,
            shard=shard,
            compute=ComputeConfig(device=options.device),
        )
        for evaluation in outcome.evaluations:
            data = evaluation.results["data"].lower()
            folder = out / name / data if len(outcome.evaluations) > 1 else out / name
            page = write_report(evaluation, folder)
            console.print(f"wrote {page}, and beside it results.json, table.md and table.tex", soft_wrap=True)


def carry_out(
    console: Console,
    name: str,
    study: Study,
    scale: Scale,
    out: Path,
    *,
    seeds: int | None,
    shard: Shard,
    compute: ComputeConfig,
) -> StudyStatus:
    """Train and measure what is missing of a study; print its table when all is there, and keep it as OUT/NAME.md and
    OUT/NAME.json."""
    if launched_by_torchrun():
        raise ValueError("A study is not for torchrun: start a worker for each GPU or host, with --shard 1/8, 2/8, …")
    check_folder(out)
    _say_what_it_takes(console, f"{name}: {study.what}", study_runs(study, scale, out, seeds))
    with counting(console, "examples") as progress:
        outcome = reproduce(
            study,
            scale,
            out,
            seeds=seeds,
            shard=shard,
            compute=compute,
            reporter=lambda cell: ProgressBarReporter(console) if console.is_terminal else LineReporter(console),
            progress=progress,
            say=lambda text: console.print(text, soft_wrap=True),
        )
    if outcome.results is None:
        console.print(
            f"{len(outcome.left)} of {len(to_train(outcome.study_runs))} runs belong to other workers; the same "
            "command prints the table when they are done.",
            soft_wrap=True,
        )
        return outcome
    table = beside_paper(outcome.results)
    console.print(terminal_wide(table))
    for ending, text in ((".json", json.dumps(outcome.results, indent=1) + "\n"), (".md", markdown(table))):
        write_atomically(out / f"{name}{ending}", text.encode())
    console.print(f"wrote {out / name}.json and {name}.md", soft_wrap=True)
    return outcome


def _say_what_it_takes(console: Console, what: str, everything: Sequence[StudyRun]) -> None:
    """How many runs are missing, and their cost."""
    todo = [cell.recipe for cell in to_train(everything) if not cell.is_finished]
    console.print(f"{what}; {len(todo)} runs to train.", soft_wrap=True)
    if todo:
        console.print(cost(todo), soft_wrap=True)


def _list(console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("NAME", "what", "runs: smoke, laptop, paper", "paper, on an A100"):
        table.add_column(heading)
    for name, study in STUDIES.items():
        runs = {
            scale: [cell.recipe for cell in to_train(study_runs(study, scale, Path()))] for scale in get_args(Scale)
        }
        table.add_row(
            name, study.what, ", ".join(str(len(recipes)) for recipes in runs.values()), gpu_time(runs["paper"])
        )
    console.print(table)
