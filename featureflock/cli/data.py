"""featureflock data: which data sets there are, getting them, and corrupting them."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from featureflock.cli.terminal import make_console, progress_bar
from featureflock.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    copy_set,
    folders_with_sets,
    frost_source,
    generate_set,
    open_set,
)
from featureflock.data.sources import cache
from featureflock.data.sources.download import DownloadProgress
from featureflock.data.sources.fetch import get as get_data
from featureflock.data.sources.registry import PUBLISHED_SETS, Name, known

app = tyro.extras.SubcommandApp()

_FIRST_RECIPE = {
    "cifar10": "cifar10-small",
    "cifar100": "cifar100-wrn16x4",
    "mnist": "mnist-cnn",
    "fashion-mnist": "fashion-mnist-cnn",
}


def main(args: list[str]) -> None:
    """Run `featureflock data` with these arguments."""
    if args[:1] in (["get"], ["corrupt"]) and len(args) > 1 and not args[1].startswith("-"):
        facts = known(args[1])  # which suggests a name; tyro would list them
        if args[0] == "corrupt" and facts.shape[2] != 3:
            colour = " and ".join(name for name, facts in PUBLISHED_SETS.items() if facts.shape[2] == 3)
            raise ValueError(f"{facts.title} is grey; the corruptions are for {colour}.")
    app.cli(prog="featureflock data", description="The data sets to train and test on.", args=args)


@app.command(name="list")
def list_sets() -> None:
    """Show the data sets: what they are, whether they are here, how to get them; and corrupted ones in the cache."""
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "pictures", "here"):
        table.add_column(heading, no_wrap=True)
    for heading in ("what", "from"):
        table.add_column(heading, overflow="fold")
    for name, facts in PUBLISHED_SETS.items():
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
    table.add_section()
    for folder in folders_with_sets(cache.cache_folder()):
        table.add_row(folder.name, *_corrupted(folder))
    console.print(table)
    console.print("To get one: featureflock data get NAME, or featureflock data get NAME --from FOLDER", soft_wrap=True)
    console.print("To corrupt the test pictures of one: featureflock data corrupt NAME", soft_wrap=True)
    console.print(
        f"They are kept in {cache.cache_folder()}; set {cache.VARIABLE} to keep them elsewhere.", soft_wrap=True
    )


def _corrupted(folder: Path) -> tuple[str, str, str, str]:
    """Pictures, size, what and from where, of a corrupted set; by the headers of its files."""
    try:
        held = open_set(folder)
        count = sum(len(held.pictures(name, s)) for name in held.corruptions for s in held.severities)
    except FileNotFoundError:
        return "0", "unfinished", "a corrupted test set", ""
    except ValueError:
        return "?", "damaged", "a corrupted test set", ""
    size = sum((folder / f"{name}.npy").stat().st_size for name in held.corruptions)
    names = f"{len(held.corruptions)} corruptions" if len(held.corruptions) > 1 else held.corruptions[0]
    what = f"{names}, severities {' '.join(map(str, held.severities))}"
    return f"{count:,}", f"{size / 1e6:,.1f} MB", what, held.source


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
    console = make_console()
    with _shown(console) as progress:
        path = get_data(name, from_, progress, say=lambda text: console.print(text, soft_wrap=True))
    held = cache.load(name)
    console.print(
        f"{PUBLISHED_SETS[name].title} {len(held.train_y):,} + {len(held.test_y):,} from {held.source} in {path}",
        soft_wrap=True,
    )
    console.print(f"Next: featureflock train {_FIRST_RECIPE[name]}", soft_wrap=True)


@app.command
def corrupt(
    name: tyro.conf.Positional[Literal["cifar10", "cifar100"]],
    corruptions: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …")] = CORRUPTIONS,
    severities: Annotated[tuple[int, ...], tyro.conf.arg(metavar="1…5 …")] = SEVERITIES,
    seed: int = 0,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FOLDER")] = None,
    workers: int | None = None,
) -> None:
    """Make the corrupted test set, in the layout of CIFAR-10-C: 15 corruptions, each with five severities.

    What is finished is not made again: run it once more after an interruption.

    Args:
        name: Which data set's test pictures.
        corruptions: Only these corruptions.
        severities: Only these severities, of 1 to 5.
        seed: Of the random numbers: the same seed gives the same bytes.
        out: Where to write the files; by default a folder in the cache.
        from_: Take the published files in this folder (fog.npy, labels.npy and so on) instead of making them.
        workers: Processes that share the work, by default one for each core. How many does not change a byte.
    """
    clean = cache.load(name)
    labels = clean.test_y.numpy()
    folder = out.expanduser() if out is not None else _default_folder(name, severities, seed, from_)
    console = make_console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    start = time.perf_counter()
    if from_ is not None:
        published = open_set(from_.expanduser())
        chosen = published.corruptions if corruptions == CORRUPTIONS else corruptions
        with progress_bar(console, "pictures") as progress:
            copy_set(published, labels, folder, corruptions=chosen, severities=severities, progress=progress, say=say)
    else:
        if "frost" in corruptions:
            say(f"Frost is made from {frost_source()}.")
            if "procedural" in frost_source():
                say("For the photographs: pip install featureflock[frost]")
        with progress_bar(console, "pictures") as progress:
            generate_set(
                clean.test_x.permute(0, 2, 3, 1).numpy(),
                labels,
                folder,
                corruptions=corruptions,
                severities=severities,
                seed=seed,
                workers=workers,
                progress=progress,
                say=say,
            )
    made = open_set(folder)
    pictures = len(made.corruptions) * len(made.severities) * len(made.labels)
    say(
        f"{PUBLISHED_SETS[name].title} corrupted: {len(made.corruptions)} × {len(made.severities)} severities, "
        f"{pictures:,} pictures, in {folder} ({time.perf_counter() - start:,.0f} s)"
    )


def _default_folder(name: str, severities: tuple[int, ...], seed: int, from_: Path | None) -> Path:
    """A folder in the cache for each set that differs."""
    parts = [f"{name}-c"]
    if from_ is not None:
        parts.append("published")
    elif seed:
        parts.append(f"seed{seed}")
    if sorted(set(severities)) != list(SEVERITIES):
        parts.append("severities" + "".join(map(str, sorted(set(severities)))))
    return cache.cache_folder() / "-".join(parts)


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[DownloadProgress]:
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
