"""featureflock data: which data sets there are, and getting them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from featureflock.data import cache
from featureflock.data.download import Progress
from featureflock.data.getting import get as get_data
from featureflock.data.published import SETS, Name, known

app = tyro.extras.SubcommandApp()

_FIRST_RECIPE = {
    "cifar10": "cifar10-small",
    "cifar100": "cifar100-wrn16x4",
    "mnist": "mnist-cnn",
    "fashion-mnist": "fashion-mnist-cnn",
}
_PIPED_WIDTH = 160
"""A table in a file or a pipe may be wider than a terminal; better that than broken words."""


def main(args: list[str]) -> None:
    """Run `featureflock data` with these arguments."""
    if args[:1] == ["get"] and len(args) > 1 and not args[1].startswith("-"):
        known(args[1])  # which suggests a name; tyro would list them
    app.cli(prog="featureflock data", description="The data sets to train and test on.", args=args)


@app.command(name="list")
def list_sets() -> None:
    """Show the data sets: what they are, whether they are here, and how to get them."""
    console = _console()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "pictures", "here"):
        table.add_column(heading, no_wrap=True)
    for heading in ("what", "from"):
        table.add_column(heading, overflow="fold")
    for name, facts in SETS.items():
        pictures, here = f"{facts.train:,} + {facts.test:,}", "not here yet"
        what, source = facts.what, " or ".join(source.words for source in facts.sources)
        try:
            held = cache.look_up(name)
        except ValueError:
            here = "damaged"
        else:
            if held is not None:
                pictures, here = f"{held.train:,} + {held.test:,}", f"{held.size / 1e6:,.1f} MB"
                what, source = facts.what if held.published else f"not the published {facts.title}", held.source
        table.add_row(name, pictures, here, what, source)
    console.print(table)
    console.print("To get one: featureflock data get NAME, or featureflock data get NAME --from FOLDER", soft_wrap=True)
    console.print(
        f"They are kept in {cache.cache_folder()}; set {cache.VARIABLE} to keep them elsewhere.", soft_wrap=True
    )


@app.command
def get(
    name: tyro.conf.Positional[Name],
    from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FOLDER")] = None,
) -> None:
    """Fetch a data set once, check it and keep it, so that no training needs the network.

    Args:
        name: Which data set; `featureflock data list` describes them.
        from_: Read it from the published files in this folder (extracted or in their archive) instead of the network.
    """
    console = _console()
    with _shown(console) as progress:
        path = get_data(name, from_, progress, say=lambda text: console.print(text, soft_wrap=True))
    held = cache.load(name)
    console.print(
        f"{SETS[name].title}: {len(held.train_y):,} + {len(held.test_y):,} pictures from {held.source}, in {path}",
        soft_wrap=True,
    )
    console.print(f"Next: featureflock train {_FIRST_RECIPE[name]}", soft_wrap=True)


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH)


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[Progress]:
    """Bars in a terminal; elsewhere a line for each thing that is fetched, and for each quarter of it."""
    if not console.is_terminal:
        yield _Lines(console).update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def update(done: int, total: int | None, what: str) -> None:
            if what not in tasks:
                for task in tasks.values():  # what came before is over: its bar must not go on pulsing
                    bars.update(task, visible=False)
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update
        for task in tasks.values():
            bars.update(task, visible=False)


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console, self.what, self.quarters = console, "", 0

    def update(self, done: int, total: int | None, what: str) -> None:
        if what != self.what:
            self.what, self.quarters = what, 0
            self.console.print(f"{what} …", soft_wrap=True)
        if total and 4 * done // total > self.quarters:
            self.quarters = 4 * done // total
            self.console.print(f"{what}: {25 * self.quarters} % of {total / 1e6:,.1f} MB", soft_wrap=True)
