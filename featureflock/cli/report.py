"""featureflock report: one HTML page about trained runs."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from featureflock.cli.evaluate import Request, run_evaluation
from featureflock.cli.terminal import make_console
from featureflock.evaluation import EvaluationProtocol
from featureflock.report import read_report, write_report
from featureflock.utils.files import check_folder


@dataclass(frozen=True)
class Options(Request):
    """Compare trained runs on one HTML page with tables and figures: report.html, which needs no network.

    Predictions that `featureflock evaluate` has cached for the same flags are used; missing ones are computed. Given a
    results.json file, or the folder that holds one, the report is written again without the runs and the data.
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for report.html, results.json, table.md, table.tex, figures/ and images/. Default: featureflock-report, or
    the folder of results.json."""
    open: bool = False
    """Open the page in the browser."""


def main(args: list[str]) -> None:
    """Run `featureflock report` with these arguments."""
    options = tyro.cli(Options, prog="featureflock report", args=args)
    console = make_console()
    source = _results_path(options)
    out = options.out or (Path("featureflock-report") if source is None else source.parent)
    check_folder(out)
    if source is None:
        evaluation = run_evaluation(options, console)
        page = write_report(evaluation.results, evaluation.images, out)
    else:
        results, images = read_report(source)
        try:
            page = write_report(results, images, out)
        except (LookupError, AssertionError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            what = f"{source} lacks values of the report or has others in their place ({error})"
            raise ValueError(f"{what}; was it edited? Evaluate the runs again.") from error
    console.print(f"wrote {page}, and beside it results.json, table.md, table.tex and figures/", soft_wrap=True)
    if options.open and not webbrowser.open(page.absolute().as_uri()):
        console.print(f"No browser was found; open {page} yourself.", soft_wrap=True)


def _results_path(options: Options) -> Path | None:
    """The results.json to write a report from; None if the arguments are runs."""
    paths = [path / "results.json" if (path / "results.json").is_file() else path for path in options.runs]
    if not any(path.is_file() for path in paths):
        return None
    if len(paths) > 1:
        raise ValueError("Give either the folders of runs or one results.json, not both.")
    if options.protocol != EvaluationProtocol():
        raise ValueError(f"{paths[0]} has been evaluated; to evaluate with other flags, give the runs.")
    return paths[0]
