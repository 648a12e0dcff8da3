"""What commands print with."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from featureflock.distributed.env import is_rank_zero

_PIPED_WIDTH = 160
"""A table in a file or a pipe may be wider than a terminal; better that than broken words."""

Count = Callable[[int, int | None, str], None]
"""Is told how many are done, of how many, and what is being done."""


def make_console() -> Console:
    """Plain words: no guesses at what is a number, a path or mark-up. Of several processes the first one prints."""
    plain = partial(Console, highlight=False, markup=False, emoji=False, quiet=not is_rank_zero())
    console = plain()
    return console if console.is_terminal else plain(width=_PIPED_WIDTH)


@contextlib.contextmanager
def counting(console: Console, unit: str) -> Iterator[Count]:
    """A bar in a terminal; elsewhere a line for each thing that is begun."""
    if not console.is_terminal:
        seen: list[str] = []

        def line(done: int, total: int | None, what: str) -> None:
            if what not in seen:
                seen.append(what)
                console.print(f"{what} … ({done:,} of {total:,} {unit} are done)", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"))
    with Bars(*columns, TextColumn(unit), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: list[TaskID] = []

        def update(done: int, total: int | None, what: str) -> None:
            if not tasks:
                tasks.append(bars.add_task(what, total=total))
                bars.reset(tasks[0], completed=done)
            bars.update(tasks[0], completed=done, total=total, description=what)

        yield update
