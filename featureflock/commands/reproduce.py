"""featureflock reproduce: a table of the paper, trained, measured, and beside the paper's numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from featureflock.commands.terminal import counting, make_console
from featureflock.evaluation.comparing import Mean
from featureflock.files import check_folder, write_atomically
from featureflock.hints import unknown
from featureflock.launched import is_launched
from featureflock.recipes import STUDIES, Outcome, Scale, Shard, Study, cells, reproduce
from featureflock.recipes.costs import cost
from featureflock.recipes.reproducing import markdown, shown
from featureflock.training import Bar, Engine, Lines


@dataclass(frozen=True)
class Options:
    """Train what a table of the paper needs and is not there yet, measure it, and print it beside the paper's numbers.

    Finished runs are never trained again, and an interrupted study goes on by the same command.
    """

    name: Annotated[str, tyro.conf.arg(metavar="NAME"), tyro.conf.Positional] = ""
    """Which table; --list says what there is."""
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
    if options.name not in STUDIES:
        raise unknown("study", options.name, STUDIES, otherwise="featureflock reproduce --list says what there is.")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {options.seeds}.")
    if is_launched():
        raise ValueError("reproduce is not for torchrun: start a worker for each GPU or host, with --shard 1/8, 2/8, …")
    shard, study = Shard.parse(options.shard), STUDIES[options.name]
    check_folder(options.out)
    todo = [cell for cell in cells(study, options.scale, options.out, options.seeds) if not cell.is_finished]
    console.print(f"{options.name}: {study.what}; {options.scale}, {len(todo)} runs to train.", soft_wrap=True)
    if todo:
        console.print(cost([cell.recipe for cell in todo]), soft_wrap=True)
    with counting(console, "examples") as progress:
        outcome = reproduce(
            study,
            options.scale,
            options.out,
            seeds=options.seeds,
            shard=shard,
            engine=Engine(device=options.device),
            reporter=lambda cell: Bar(console) if console.is_terminal else Lines(console),
            progress=progress,
            say=lambda text: console.print(text, soft_wrap=True),
        )
    if outcome.results is None:
        console.print(
            f"{len(outcome.left)} of {len(outcome.cells)} runs are in the hands of other workers; the same command "
            "prints the table when they are done.",
            soft_wrap=True,
        )
        return
    console.print(_table(study, outcome))
    target = options.out / options.scale / options.name
    write_atomically(target.with_suffix(".json"), (json.dumps(outcome.results, indent=1) + "\n").encode())
    write_atomically(target.with_suffix(".md"), markdown(outcome).encode())
    console.print(f"wrote {target}.json and {target}.md", soft_wrap=True)


def _list(console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("NAME", "what", "runs: smoke, laptop, paper"):
        table.add_column(heading)
    for name, study in STUDIES.items():
        counts = [str(len(study.rows) * study.seeds_at(scale)) for scale in ("smoke", "laptop", "paper")]
        table.add_row(name, study.what, ", ".join(counts))
    console.print(table)


def _table(study: Study, outcome: Outcome) -> Table:
    assert outcome.results is not None
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=study.what, caption="Below each row: the paper's.")
    table.add_column("")
    keys = list(outcome.results["rows"][0]["ours"])
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right")
    for row in outcome.results["rows"]:
        table.add_row(row["title"], *(shown(key, Mean(**row["ours"][key])) for key in keys))
        if row["paper"]:
            table.add_row("  paper", *(row["paper"].get(key, "") for key in keys), style="dim")
    return table
