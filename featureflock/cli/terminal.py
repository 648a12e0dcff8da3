"""Console and progress bars of the commands."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from featureflock.cli.output import Output, printable
from featureflock.distributed.env import is_rank_zero
from featureflock.utils.progress import ProgressCallback

_PIPED_WIDTH = 160
"""Width of tables in a file or a pipe, where wide lines are better than broken words."""


class _PrintableConsole(Console):
    """A console whose text has no control characters; those of rich itself are in segments of their own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(*, stderr: bool = False) -> Console:
    """A console for plain text: nothing is highlighted or read as mark-up. Only rank 0 prints."""
    stream = sys.stderr if stderr else sys.stdout
    file = cast(TextIO, stream.trusted) if isinstance(stream, Output) else None
    quiet = not is_rank_zero()
    plain = partial(
        _PrintableConsole, file=file, stderr=stderr, highlight=False, markup=False, emoji=False, quiet=quiet
    )
    console = plain()
    return console if console.is_terminal else plain(width=_PIPED_WIDTH)


@contextlib.contextmanager
def progress_bar(console: Console, unit: str) -> Iterator[ProgressCallback]:
    """A progress bar in a terminal; elsewhere one line for each description."""
    if not console.is_terminal:
        printed: set[str] = set()

        def print_line(done: int, total: int | None, what: str) -> None:
            if what not in printed:
                printed.add(what)
                console.print(f"{what} ({done:,} of {total:,} {unit} done)", soft_wrap=True)

        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"))
    with Progress(*columns, TextColumn(unit), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: list[TaskID] = []

        def update(done: int, total: int | None, what: str) -> None:
            if not tasks:
                tasks.append(bars.add_task(what, total=total))
                bars.reset(tasks[0], completed=done)
            bars.update(tasks[0], completed=done, total=total, description=what)

        yield update


@contextlib.contextmanager
def resumed_by_same_command(what: str) -> Iterator[None]:
    """After Ctrl-C, report that the same command resumes: it needs no flag, unlike a single training run."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"stopped; the same command resumes {what}.") from interrupt
