"""featureflock data: list, download and corrupt data sets."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from featureflock.cli.terminal import make_console, progress_bar
from featureflock.corruptions import CORRUPTIONS, SEVERITIES, copy_set, find_sets, frost_source, generate_set, open_set
from featureflock.data.sources import cache
from featureflock.data.sources.fetch import get as get_data
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.utils.progress import ProgressCallback

app = tyro.extras.SubcommandApp()
Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
From = Annotated[Path | None, tyro.conf.arg(name="from", metavar="FOLDER")]


def main(args: list[str]) -> None:
    """Run `featureflock data` with these arguments."""
    if args[:1] in (["get"], ["corrupt"]) and len(args) > 1 and not args[1].startswith("-"):
        published = PUBLISHED_SETS[args[1]]  # suggests a name if it is unknown
        if args[0] == "corrupt" and published.shape[2] != 3:
            colour = " and ".join(name for name, entry in PUBLISHED_SETS.items() if entry.shape[2] == 3)
            raise ValueError(f"{published.title} is in grey, but the corruptions need colour images; use {colour}.")
    app.cli(prog="featureflock data", description="List, download and corrupt data sets.", args=args)


@app.command(name="list")
def list_sets() -> None:
    """List the data sets: size, whether they are cached, and where they come from."""
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "images", "cached", "description", "source"):
        table.add_column(heading, no_wrap=heading in ("name", "images", "cached"), overflow="fold")
    for name, published in PUBLISHED_SETS.items():
        images, cached = f"{published.train:,} + {published.test:,}", "no"
        description, source = published.description, " or ".join(source.title for source in published.sources)
        try:
            if entry := cache.look_up(name):
                images, cached = f"{entry.train:,} + {entry.test:,}", f"{entry.size / 1e6:,.1f} MB"
                description = description if entry.published else f"custom version of {published.title}"
                source = entry.source
        except ValueError:
            cached = "damaged"
        table.add_row(name, images, cached, description, source)
    table.add_section()
    for folder in find_sets(cache.cache_folder()):
        table.add_row(folder.name, *_corrupted_row(folder))
    console.print(table)
    console.print("Download a data set: featureflock data get NAME")
    console.print("Read it from files: featureflock data get NAME --from FOLDER")
    console.print("Corrupt its test images: featureflock data corrupt NAME")
    console.print(f"Cache folder: {cache.cache_folder()} (set {cache.VARIABLE} to change it)", soft_wrap=True)


def _corrupted_row(folder: Path) -> tuple[str, str, str, str]:
    """Number of images, size, description and source of a corrupted set, from the headers of its files."""
    try:
        corrupted = open_set(folder)
        count = sum(corrupted.shape(name)[0] for name in corrupted.corruptions)
    except FileNotFoundError:
        return "0", "unfinished", "corrupted test set", ""
    except ValueError:
        return "?", "damaged", "corrupted test set", ""
    size = sum((folder / f"{name}.npy").stat().st_size for name in corrupted.corruptions)
    names = f"{len(corrupted.corruptions)} corruptions" if len(corrupted.corruptions) > 1 else corrupted.corruptions[0]
    description = f"{names}, severities {' '.join(map(str, corrupted.severities))}"
    return f"{count:,}", f"{size / 1e6:,.1f} MB", description, corrupted.source


@app.command
def get(name: Name, from_: From = None) -> None:
    """Download a data set, verify it and store it in the cache; training needs no network afterwards.

    Args:
        name: Data set; `featureflock data list` lists them.
        from_: Read the published files in this folder (extracted or in their archive) instead of downloading; for CIFAR
            also class folders of images, train/<class>/*.png and test/<class>/*.png.
    """
    console = make_console()
    with _download_progress(console) as progress:
        path = get_data(name, from_, progress, log=lambda text: console.print(text, soft_wrap=True))
    published, cached = PUBLISHED_SETS[name], cache.load(name)
    counts = f"{len(cached.train_y):,} + {len(cached.test_y):,} images"
    console.print(f"{published.title}: {counts} from {cached.source}, cached in {path}", soft_wrap=True)
    if published.recipe:
        console.print(f"Next: featureflock train {published.recipe}", soft_wrap=True)


@app.command
def corrupt(
    name: Name,
    corruptions: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …")] = CORRUPTIONS,
    severities: Annotated[tuple[int, ...], tyro.conf.arg(metavar="1…5 …")] = SEVERITIES,
    seed: int = 0,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    from_: From = None,
    workers: int | None = None,
) -> None:
    """Generate the corrupted test set in the format of CIFAR-10-C: 15 corruptions at five severities.

    Finished files are not generated again, so an interrupted command resumes when it is repeated.

    Args:
        name: Data set of colour images: cifar10 or cifar100.
        corruptions: Only these corruptions.
        severities: Only these severities, from 1 to 5.
        seed: Random seed; the same seed gives the same bytes.
        out: Output folder; by default a folder in the cache.
        from_: Copy the published files in this folder (fog.npy, labels.npy and so on) instead of generating them.
        workers: Number of processes, by default one per core. The result does not depend on it.
    """
    clean = cache.load(name)
    labels = clean.test_y.numpy()
    folder = out.expanduser() if out is not None else _default_folder(name, severities, seed, from_)
    console = make_console()

    def log(text: str) -> None:
        console.print(text, soft_wrap=True)

    start = time.perf_counter()
    if from_ is None and "frost" in corruptions:
        log(f"Frost is generated from {frost_source()}.")
        if "procedural" in frost_source():
            log("The published frost photographs are not installed; install them with: pip install featureflock[frost]")
    with progress_bar(console, "images") as progress:
        options: dict[str, Any] = {"severities": severities, "progress": progress, "log": log}
        if from_ is not None:
            published = open_set(from_.expanduser())
            chosen = published.corruptions if corruptions == CORRUPTIONS else corruptions
            copy_set(published, labels, folder, corruptions=chosen, **options)
        else:
            images = clean.test_x.permute(0, 2, 3, 1).numpy()
            generate_set(images, labels, folder, corruptions=corruptions, seed=seed, workers=workers, **options)
    result = open_set(folder)
    counts = len(result.corruptions), len(result.severities), len(result.labels)
    made = f"{counts[0]} corruptions × {counts[1]} severities, {math.prod(counts):,} images, in {folder}"
    log(f"{PUBLISHED_SETS[name].title} corrupted: {made} ({time.perf_counter() - start:,.0f} s)")


def _default_folder(name: str, severities: tuple[int, ...], seed: int, from_: Path | None) -> Path:
    """Return a folder in the cache that is unique to the options."""
    parts = [f"{name}-c"]
    if from_ is not None:
        parts.append("published")
    elif seed:
        parts.append(f"seed{seed}")
    if sorted(set(severities)) != list(SEVERITIES):
        parts.append("severities" + "".join(map(str, sorted(set(severities)))))
    return cache.cache_folder() / "-".join(parts)


@contextlib.contextmanager
def _download_progress(console: Console) -> Iterator[ProgressCallback]:
    """Progress bars in a terminal; otherwise one line for each file and each quarter of it."""
    if not console.is_terminal:
        print_once = functools.cache(lambda line: console.print(line, soft_wrap=True))

        def print_lines(done: int, total: int | None, name: str) -> None:
            print_once(f"{name} …")
            if total and (quarters := 4 * done // total):
                print_once(f"{name}: {25 * quarters} % of {total / 1e6:,.1f} MB")

        yield print_lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task, current = bars.add_task("", visible=False), ""

        def update(done: int, total: int | None, name: str) -> None:
            nonlocal task, current
            if name != current:
                bars.remove_task(task)
                task, current = bars.add_task(name, total=total), name
            bars.update(task, completed=done, total=total)

        yield update
