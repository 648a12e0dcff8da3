"""featureflock demo: a comparison that needs nothing but a minute."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from featureflock.demo import METHODS, Settings, compare
from featureflock.demo_report import summarise, tables, verdict, write_report
from featureflock.utils.files import check_folder


def main(args: list[str]) -> None:
    """Run `featureflock demo` with these arguments."""
    try:
        tyro.cli(demo, prog="featureflock demo", args=args)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("stopped; no report was written.") from interrupt


def demo(
    settings: Annotated[Settings, tyro.conf.arg(name="")] = Settings(),
    out: Path = Path("featureflock-demo"),
) -> None:
    """Compare five ways to train an ensemble on two-view digits (embedded, no download; about a minute).

    Args:
        settings: What to train.
        out: Folder for the report, its pictures and results.json.
    """
    check_folder(out)
    console = Console()
    console.print(
        f"Two-view digits: {len(METHODS)} methods × {settings.seeds} seeds, {settings.members} members, "
        f"{settings.epochs} epochs."
    )
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=None)
        outcomes = compare(settings, lambda done, total: progress.update(bar, completed=done, total=total))
    summary = summarise(outcomes, settings)
    for table in tables(summary):
        console.print(table)
    console.print(verdict(summary), highlight=False)
    for path in write_report(outcomes, summary, out):
        console.print(f"wrote {path}", highlight=False)
