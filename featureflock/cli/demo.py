"""featureflock demo: five methods on built-in data, trained, evaluated and compared in about a minute."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from featureflock.cli.reproduce import print_pages, run_with_progress, write_pages
from featureflock.cli.terminal import make_console, resumed_by_same_command
from featureflock.core.priors import Cauchy
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation.metrics.registry import find_metric
from featureflock.evaluation.statistics import PairedDifference
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.reports import terminal_table
from featureflock.reports.tables import beside_paper, significance
from featureflock.studies import Row, Study
from featureflock.studies.study import method_rows
from featureflock.training import RECIPES
from featureflock.utils.files import write_atomically

_INTRODUCTION = """\
Each image shows two scans of the same digit side by side, so either half determines the class. Members that rely on
different halves still know the digit when one half is blank.
  Single                  one network
  Deep Ensembles          several networks, trained independently
  feature-MAP             several networks with a shared last layer and a prior on their features
  feature-WGD, τ = 1      and repulsion between their features: the paper's method
  feature-WGD, tuned      and the strength of the repulsion τ that validation images chose
"""
_TUNED = "feature-WGD, tuned"
_COLUMNS = (
    *("accuracy", "nll", "one_view_accuracy", "one_view_nll", "corrupted_accuracy", "corrupted_nll"),
    *("view_difference_by_input", "disagreement"),
)


@dataclass(frozen=True)
class Options:
    """Compare five methods on two-view digits, a built-in data set, in about a minute.

    Each image shows two scans of the same digit side by side, so either half determines the class. The table shows how
    accurate the ensembles are on whole images, with one half blank, and with noise or low contrast, and how much
    members differ in the half that they rely on.
    """

    seeds: int = 5
    """Number of seeds: images, initial weights and order of the data."""
    members: int = 5
    """Number of members of each ensemble."""
    epochs: int = 60
    """Number of passes over the 1,200 training images."""
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
    with resumed_by_same_command("the demo"):
        status = run_with_progress(
            console, "demo", study, "paper", out / "runs", seeds=options.seeds, workers=options.workers
        )
    if status.results is None:
        return
    write_atomically(out / "demo.json", (json.dumps(status.results, indent=1) + "\n").encode())
    print_pages(console, write_pages(status, out))
    console.print(terminal_table(beside_paper(status.results)))
    for sentence in story(status.results):
        console.print(sentence, soft_wrap=True)
    console.print(f"Open {out}/report.html in a browser for figures and more tables.", soft_wrap=True)


def demo_study(members: int, epochs: int) -> Study:
    """Five methods on two-view digits, with other images for each seed."""
    base = replace(RECIPES["two-view-digits"].recipe, members=members, epochs=epochs)
    tuned = base.method
    assert isinstance(tuned, FeatureWGD)
    return Study(
        "Five methods on two-view digits",
        (
            *method_rows(base, {Single(): "", DeepEnsembles(): "", FeatureMAP(tuned.prior): ""}),
            Row("feature-WGD, τ = 1", replace(base, method=FeatureWGD(Cauchy(1e-3)))),
            Row(_TUNED, base),
        ),
        _COLUMNS,
        test_on=EvaluationProtocol(corruptions=("gaussian_noise", "contrast"), severities=(1, 3, 5), ood=(), maps=0),
        new_subsets=True,
    )


def story(results: Mapping[str, Any]) -> list[str]:
    """What the tuned feature-WGD changes compared with Deep Ensembles, in words."""
    rows = {row["title"]: row for row in results["rows"]}
    ours, theirs = rows[_TUNED], rows[DeepEnsembles.title]
    topics = {
        "accuracy": "Accuracy on whole images",
        "one_view_accuracy": "Accuracy with one half blank",
        "nll": "NLL on whole images",
        "one_view_nll": "NLL with one half blank",
        "corrupted_accuracy": "Accuracy with noise or low contrast",
        "view_difference_by_input": "Difference between members in the half that they rely on",
    }
    sentences = [f"{_TUNED} vs {DeepEnsembles.title}:"]
    for key, topic in topics.items():
        metric, difference = find_metric(key), PairedDifference(**ours["differences"][key])
        unit, low, high = " %" if metric.percent else "", difference.low, difference.high
        values = (metric.text(row["ours"][key]["mean"]) for row in (ours, theirs))
        text = f"  {topic}: {' against '.join(f'{value}{unit}' for value in values)}"
        if low is not None and high is not None:
            interval = f"[{metric.text(low)}, {metric.text(high)}]"
            outcome = significance(metric, difference)
            verdict = f", significantly {outcome}" if outcome else ""
            text += f", {metric.text(difference.mean, sign=True)} {interval}{verdict}"
        sentences.append(f"{text}.")
    return sentences
