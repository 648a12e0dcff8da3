"""featureflock demo: five methods on built-in data, trained, evaluated and compared in about a minute."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from featureflock.cli.reproduce import run_with_progress, write_pages
from featureflock.cli.terminal import make_console
from featureflock.core.priors import Cauchy, Uniform
from featureflock.evaluation import EvaluationProtocol
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.report import terminal_tables
from featureflock.studies import Row, Study
from featureflock.studies.study import PAPER, method_rows
from featureflock.training import RECIPES
from featureflock.utils.files import write_atomically

_INTRODUCTION = """\
Each image shows two scans of the same digit side by side, so either half determines the class.
  Single                  one network
  Deep Ensembles          several networks, trained independently
  feature-MAP, no prior   several networks with a shared last layer
  feature-MAP             and a prior on their features
  feature-WGD             and repulsion between their features: the paper's method
"""


@dataclass(frozen=True)
class Options:
    """Compare five methods on two-view digits, a built-in data set, in about a minute.

    Each image shows two scans of the same digit side by side, so either half determines the class. The tables show the
    calibrated metrics of the paper; the report also shows how accurate the ensembles are with one half only.
    """

    seeds: int = 5
    """Number of seeds: initial weights and order of the data."""
    members: int = 5
    """Number of members of each ensemble."""
    epochs: int = 60
    """Number of passes over the 300 training images."""
    workers: int = os.cpu_count() or 1
    """Number of processes that train in parallel."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("featureflock-demo")
    """Folder for report.html, tables, results and runs."""


def main(args: list[str]) -> None:
    """Run `featureflock demo` with these arguments."""
    options = tyro.cli(Options, prog="featureflock demo", args=args)
    if options.members < 2:
        raise ValueError(f"--members must be at least 2; got {options.members}.")
    console, out = make_console(), options.out
    study = demo_study(options.members, options.epochs)
    console.print(_INTRODUCTION)
    try:
        status = run_with_progress(
            console, "demo", study, "paper", out / "runs", seeds=options.seeds, workers=options.workers
        )
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("stopped; the same command resumes the demo.") from interrupt
    if status.results is None:
        return
    for table in terminal_tables(status.evaluations[0].results)[:2]:  # the comparison, and the differences
        console.print(table)
    write_atomically(out / "demo.json", (json.dumps(status.results, indent=1) + "\n").encode())
    write_pages(console, status, out)
    console.print(f"Open {out}/report.html in a browser for figures and more tables.", soft_wrap=True)


def demo_study(members: int, epochs: int) -> Study:
    """Five methods on 300 two-view digits, few enough for errors to occur in every part of the test set."""
    base = replace(
        RECIPES["two-view-digits"].recipe,
        members=members,
        subset=300,
        epochs=epochs,
        decay_epochs=tuple(e for e in (epochs // 2, epochs * 3 // 4) if e),
    )
    prior = Cauchy(1e-3)
    return Study(
        "Five methods on two-view digits",
        (
            *method_rows(base, {Single(): "", DeepEnsembles(): ""}),
            Row("feature-MAP, no prior", replace(base, method=FeatureMAP(Uniform()))),
            *method_rows(base, {FeatureMAP(prior): "", FeatureWGD(prior): ""}),
        ),
        (*PAPER, "only_left_accuracy", "only_right_accuracy", "disagreement"),
        test_on=EvaluationProtocol(corruptions=("gaussian_noise", "contrast"), severities=(1, 3, 5), ood=(), maps=0),
    )
