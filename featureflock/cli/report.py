"""featureflock report: one HTML page about trained runs, or about the predictions of any ensembles."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from featureflock.cli.evaluate import Request, print_tables, run_evaluation
from featureflock.cli.terminal import make_console
from featureflock.evaluation import EvaluationProtocol, EvaluationResults, evaluate_files
from featureflock.reports import read_report, terminal_tables, write_report
from featureflock.tasks import Classification, MultiLabel, Regression
from featureflock.utils.files import check_folder


@dataclass(frozen=True)
class Options(Request):
    """Compare trained runs on one HTML page with tables and figures: report.html, which needs no network.

    Predictions that `featureflock evaluate` has cached for the same flags are used; missing ones are computed. Given a
    results.json file, or the folder that holds one, the report is written again without the runs and the data.

    With --predictions, it compares the predictions of any ensembles: .npz files with probs (members, examples, classes)
    and labels, one for each method and seed, named METHOD-seedK.npz. docs/tutorials/any_ensemble.md lists all arrays.
    """

    predictions: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.npz …")] = ()
    """Files of predictions, instead of runs."""
    baseline: str | None = None
    """With --predictions: the method that differences are from. Default: Deep Ensembles."""
    task: Literal["classification", "multi-label", "regression"] = "classification"
    """With --predictions: the task that they belong to."""
    data: str = "custom data"
    """With --predictions: name of the data, for titles."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for report.html, results.json, table.md, table.tex, figures/ and images/. Default: featureflock-report, or
    the folder of results.json."""
    open: bool = False
    """Open the page in the browser."""


def main(args: list[str]) -> None:
    """Run `featureflock report` with these arguments."""
    options = tyro.cli(Options, prog="featureflock report", args=args)
    console = make_console()
    _check_predictions(options)
    source = _results_path(options)
    out = options.out or (Path("featureflock-report") if source is None else source.parent)
    check_folder(out)
    if options.predictions:
        page = write_report(_evaluate_files(options, console), {}, out)
    elif source is None:
        evaluation = run_evaluation(options, console)
        page = write_report(evaluation.results, evaluation.images, out)
        print_tables(evaluation, console)
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


def _check_predictions(options: Options) -> None:
    """Refuse flags that do not belong together."""
    if not options.predictions:
        for name in ("baseline", "task", "data"):
            if getattr(options, name) != getattr(Options, name):
                raise ValueError(f"--{name} belongs to --predictions FILE.npz …, which is not given.")
        return
    if options.runs:
        raise ValueError("Give either runs or --predictions FILE.npz …, not both.")
    if options.protocol != EvaluationProtocol(calibration=options.protocol.calibration):
        raise ValueError("Test sets are those in the files; of the flags that choose them, only --calibration is used.")


def _evaluate_files(options: Options, console: Console) -> EvaluationResults:
    task = {"classification": Classification(), "multi-label": MultiLabel(), "regression": Regression()}[options.task]
    results = evaluate_files(
        options.predictions,
        task,
        baseline=options.baseline,
        calibration=options.protocol.calibration,
        data=options.data,
    )
    for note in results.notes:
        console.print(note, soft_wrap=True)
    for table in terminal_tables(results):
        console.print(table)
    return results


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
