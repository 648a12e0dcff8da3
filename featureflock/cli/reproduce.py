"""featureflock reproduce: train and evaluate the tables and figures of the paper, next to the paper's numbers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from featureflock.cli.terminal import make_console, progress_bar, resumed_by_same_command
from featureflock.distributed.env import launched_by_torchrun
from featureflock.reports import markdown, terminal_table, write_report
from featureflock.reports.tables import beside_paper
from featureflock.studies import STUDIES, Scale, Shard, Study, StudyRun, StudyStatus, run_study, study_runs, to_train
from featureflock.studies.costs import cost, gpu_time
from featureflock.training import ComputeConfig, LineReporter, ProgressBarReporter
from featureflock.utils.files import check_folder, write_atomically


@dataclass(frozen=True)
class Options:
    """Train and evaluate the runs of a table or figure, and print our numbers next to the paper's.

    Finished runs are not trained again, and the same command resumes an interrupted study. ImageNet is read from the
    folder imagenet (or a link to it) in the current directory.
    """

    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …"), tyro.conf.Positional] = ()
    """Studies to run, or `all`; --list shows the names."""
    scale: Scale = "smoke"
    """smoke: built-in digits, seconds. laptop: small networks on CIFAR-10, hours. paper: as in the paper, on GPUs."""
    seeds: int | None = None
    """Number of seeds; by default 2 (smoke), 3 (laptop), or the paper's number."""
    first_seed: int = 0
    """The first seed; the others follow it."""
    workers: int = 1
    """Number of processes on this machine that train runs in parallel."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/K")] = "1/1"
    """Run as worker I of K that share the output folder, on one machine or several. Each worker starts with
    its part of the runs, then helps the others."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("reproductions")
    """Folder for runs, tables and reports."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""
    list: bool = False
    """List the studies and their costs."""


def main(args: list[str]) -> None:
    """Run `featureflock reproduce` with these arguments."""
    options = tyro.cli(Options, prog="featureflock reproduce", args=args)
    console = make_console()
    if options.list:
        _list_studies(console)
        return
    if not options.names:
        raise ValueError("Name a study, such as cifar10, or all; featureflock reproduce --list shows the studies.")
    studies = dict(STUDIES) if options.names == ("all",) else {name: STUDIES[name] for name in options.names}
    out, compute = options.out / options.scale, ComputeConfig(device=options.device)
    if len(studies) > 1:
        runs = [
            run
            for study in studies.values()
            for run in study_runs(study, options.scale, out, options.seeds, options.first_seed)
        ]
        _print_cost(console, f"{len(studies)} studies", runs)
    for name, study in studies.items():
        with resumed_by_same_command("the study"):
            status = run_with_progress(
                console,
                name,
                study,
                options.scale,
                out,
                seeds=options.seeds,
                first_seed=options.first_seed,
                shard=options.shard,
                workers=options.workers,
                compute=compute,
            )
        pages = write_pages(status, out / name)
        write_table(console, name, status, out)
        print_pages(console, pages)


def run_with_progress(
    console: Console,
    name: str,
    study: Study,
    scale: Scale,
    out: Path,
    *,
    seeds: int | None,
    first_seed: int = 0,
    shard: str = "1/1",
    workers: int = 1,
    compute: ComputeConfig = ComputeConfig(),
) -> StudyStatus:
    """Run a study with its runs in OUT, and show its cost and progress."""
    if launched_by_torchrun():
        raise ValueError("Studies do not run under torchrun; start one worker per GPU or host with --shard 1/8, 2/8, …")
    check_count("seeds", 1 if seeds is None else seeds)
    check_count("workers", workers)
    if first_seed < 0:
        raise ValueError(f"--first-seed must be at least 0; got {first_seed}.")
    worker = Shard.parse(shard)
    check_folder(out)
    _print_cost(console, f"{name}: {study.title}", study_runs(study, scale, out, seeds, first_seed))
    with progress_bar(console, "runs") as training_progress, progress_bar(console, "examples") as progress:
        status = run_study(
            study,
            scale,
            out,
            seeds=seeds,
            first_seed=first_seed,
            shard=worker,
            workers=workers,
            compute=compute,
            reporter=lambda: ProgressBarReporter(console) if console.is_terminal else LineReporter(console),
            training_progress=training_progress,
            progress=progress,
            log=lambda text: console.print(text, soft_wrap=True),
        )
    if status.unfinished:
        count = f"{len(status.unfinished)} of {len(to_train(status.runs))} runs"
        hint = "run the same command again when they are finished to print the table."
        console.print(f"{count} belong to other workers; {hint}", soft_wrap=True)
    return status


def check_count(flag: str, value: int, most: int = 1000) -> None:
    """Raise ValueError for a number of seeds, processes or runs that cannot be meant."""
    if value < 1:
        raise ValueError(f"--{flag} must be at least 1; got {value}.")
    if value > most:
        raise ValueError(f"--{flag} must be at most {most:,}; got {value:,}.")


def write_table(console: Console, name: str, status: StudyStatus, out: Path) -> None:
    """Write the table of a complete study to OUT/NAME.md and OUT/NAME.json, and print it."""
    if status.results is None:
        return
    table = beside_paper(status.results)
    write_atomically(out / f"{name}.json", (json.dumps(status.results, indent=1) + "\n").encode())
    write_atomically(out / f"{name}.md", markdown(table).encode())
    console.print(terminal_table(table))
    console.print(f"wrote {out / name}.json and {name}.md", soft_wrap=True)


def write_pages(status: StudyStatus, folder: Path) -> list[Path]:
    """Write the report page of a complete study, or one per data set in subfolders."""
    pages = []
    for evaluation in status.evaluations:
        several = len(status.evaluations) > 1
        target = folder / evaluation.results.data.lower().replace(" ", "-") if several else folder
        pages.append(write_report(evaluation.results, evaluation.images, target))
    return pages


def print_pages(console: Console, pages: Sequence[Path]) -> None:
    """Print what `write_pages` wrote."""
    for page in pages:
        console.print(f"wrote {page}, results.json, table.md and table.tex", soft_wrap=True)


def _print_cost(console: Console, title: str, runs: Sequence[StudyRun]) -> None:
    """The number of runs to train and their cost."""
    missing = [run.recipe for run in to_train(runs) if not run.is_finished]
    console.print(f"{title}; {len(missing)} runs to train.", soft_wrap=True)
    if missing:
        console.print(cost(missing), soft_wrap=True)


def _list_studies(console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("NAME", "paper", "study", "runs: smoke, laptop, paper", "paper scale on an A100"):
        table.add_column(heading, no_wrap=heading != "study")
    for name, study in sorted(STUDIES.items(), key=lambda entry: _paper_order(entry[1])):
        runs = {scale: [run.recipe for run in to_train(study_runs(study, scale, Path()))] for scale in get_args(Scale)}
        counts = ", ".join(str(len(recipes)) for recipes in runs.values())
        table.add_row(name, study.source or "–", study.title, counts, gpu_time(runs["paper"]))
    console.print(table)


def _paper_order(study: Study) -> tuple[bool, bool, int]:
    """Tables by their number, then figures, then studies that are not in the paper."""
    number = next((int(word) for word in study.source.replace(",", "").split() if word.isdigit()), 0)
    return not study.source, study.source.startswith("Figure"), number
