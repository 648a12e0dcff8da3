"""featureflock report: one page about trained runs."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from featureflock.cli.evaluate import Request, carry_out, show
from featureflock.cli.terminal import make_console
from featureflock.report import write_report
from featureflock.utils.files import check_folder


@dataclass(frozen=True)
class Options(Request):
    """Write a page that compares trained runs: report.html, one file that needs no network, with tables and figures.

    What `featureflock evaluate` has computed with the same flags is used; what is missing is computed.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("featureflock-report")
    """Folder for report.html, results.json, table.md and table.tex, and figures of their own."""
    open: bool = False
    """Show the page in the browser."""


def main(args: list[str]) -> None:
    """Run `featureflock report` with these arguments."""
    options = tyro.cli(Options, prog="featureflock report", args=args)
    console = make_console()
    check_folder(options.out)
    evaluation = carry_out(options, console)
    show(evaluation, console)
    page = write_report(evaluation, options.out)
    console.print(f"wrote {page}, and beside it results.json, table.md and table.tex", soft_wrap=True)
    if options.open and not webbrowser.open(page.absolute().as_uri()):
        console.print(f"There is no browser to open it with; open {page} by hand.", soft_wrap=True)
