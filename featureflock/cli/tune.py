"""featureflock tune: choose prior precision, rank and repulsion on held-out training examples."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from featureflock.cli.recipe_flags import read_flags, train_command
from featureflock.cli.reproduce import print_table, run_with_progress
from featureflock.cli.terminal import make_console
from featureflock.data import HeldOut
from featureflock.evaluation.metrics.registry import METRICS, Metric, find_metric
from featureflock.methods import DeepEnsembles, Method
from featureflock.studies import Row, Study
from featureflock.studies.study import CLEAN, CORRUPTED
from featureflock.training import Recipe


@dataclass(frozen=True)
class Search:
    """Candidates to train, and the metric that selects the best."""

    precisions: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """Precisions of the method's prior."""
    ranks: tuple[int, ...] = ()
    """Ranks of the projection; by default only the recipe's."""
    repulsions: tuple[float, ...] = ()
    """Strengths of the repulsion; by default only the recipe's."""
    by: str = "nll"
    """Metric to choose by, computed on the held-out examples after temperature scaling and averaged over seeds: nll,
    accuracy, brier, ece, corrupted_nll, or any other metric that can rank candidates."""
    held_out: int = 5_000
    """Training examples to hold out, balanced over classes. The test set is not used."""
    reference: bool = False
    """Also train Deep Ensembles, and show the differences from them on the held-out examples."""
    seeds: int = 1
    """Number of seeds for each candidate."""
    workers: int = 1
    """Number of processes on this machine that train candidates in parallel."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/K")] = "1/1"
    """Run as worker I of K that share the output folder."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("tuning")
    """Folder for runs and tables. Runs that are finished there are not trained again."""


def main(args: list[str]) -> None:
    """Run `featureflock tune` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: featureflock tune NAME [FLAGS]\n\n"
            "Train a recipe with several prior precisions, ranks and repulsions on part of the training set, and\n"
            "choose the best on the rest. The test set is not used. featureflock train --help lists the recipes, and\n"
            "featureflock tune NAME --help the flags. For example:\n"
            "  featureflock tune digits-cnn --precisions 1e-3 1e-2 --repulsions 1 3 10 --held-out 200"
        )
        return
    extra = ("search", Annotated[Search, tyro.conf.arg(name="")], dataclasses.field(default=Search()))
    name, options = read_flags("tune", args, "Chooses precision, rank and repulsion on held-out examples. ", extra)
    search: Search = options.search
    study, candidates = make_study(options.recipe, search)
    console = make_console()
    status = run_with_progress(
        console,
        f"tune-{name}",
        study,
        "paper",
        search.out,
        seeds=search.seeds,
        shard=search.shard,
        workers=search.workers,
        compute=options.compute,
    )
    if status.results is None:
        return
    print_table(console, f"tune-{name}", status, search.out)
    rows = [row for row in status.results["rows"] if row["title"] in candidates]
    metric, note = reliable_metric(rows, find_metric(search.by))
    best = choose(rows, metric)
    if note:
        console.print(note, soft_wrap=True)
    console.print(f"Best by {metric.key} on the held-out examples: {best}.", soft_wrap=True)
    for field, values in _grid(search).items():
        if len(values) > 1 and candidates[best].get(field) in (min(values), max(values)):
            console.print(f"This is the smallest or largest {field} tried; try values beyond it.", soft_wrap=True)
    flags = {"precision": "--method.prior.precision", "rank": "--method.rank", "repulsion": "--method.repulsion"}
    words = [word for field, value in candidates[best].items() for word in (flags[field], f"{value:.15g}")]
    command = train_command(
        name, args[1:], {field.name.replace("_", "-") for field in dataclasses.fields(Search)}, words
    )
    console.print(f"To train with it on all examples: {command}", soft_wrap=True)


def make_study(recipe: Recipe, search: Search) -> tuple[Study, dict[str, dict[str, float]]]:
    """A study whose rows are the candidates, and the values of each by the row's title."""
    metric, kind = find_metric(search.by), recipe.data.task.kind
    if kind not in metric.tasks:
        raise ValueError(f"--by {search.by} does not apply to {kind}; choose another metric, such as nll.")
    if "{}" in metric.key:
        raise ValueError(f"--by {search.by} is a family of metrics; give a name in place of {{}}, as in auroc_noise.")
    if not metric.better:
        directed = [
            key for key, known in METRICS.items() if known.better and known.parts is None and kind in known.tasks
        ]
        raise ValueError(f"--by {search.by} cannot rank candidates; choose one of {', '.join(directed)}.")
    candidates: dict[str, dict[str, float]] = {}
    rows = []
    data = HeldOut(recipe.data, search.held_out, recipe.split_seed)
    grid = {field: values for field, values in _grid(search).items() if values}
    for values in itertools.product(*grid.values()):
        given = dict(zip(grid, values, strict=True))
        title = ", ".join(f"{field} {value:.15g}" for field, value in given.items()) or "unchanged"
        candidates[title] = given
        rows.append(Row(title, replace(recipe, data=data, method=_with(recipe.method, given))))
    if search.reference:
        rows.append(Row(DeepEnsembles.title, replace(recipe, data=data, method=DeepEnsembles())))
    corrupted = CORRUPTED if metric.group in ("corrupted", "severity") or "corrupted" in metric.key else ()
    clean = [key for key, known in METRICS.items() if kind in known.tasks and known.group == "clean"]
    members = ("member_accuracy", "disagreement") if kind == "classification" else ("epistemic_share",)
    scores = CLEAN if kind == "classification" else clean
    columns = dict.fromkeys((*scores, *corrupted, metric.key, metric.uncalibrated, *members))
    title = f"{recipe.method.title} on {search.held_out:,} held-out training examples"
    return Study(title, tuple(rows), tuple(filter(None, columns)), search.seeds), candidates


def reliable_metric(rows: Sequence[dict[str, Any]], metric: Metric) -> tuple[Metric, str]:
    """The metric to rank by and, if it is not the given one, why.

    Where a fitted temperature is at its bound, the calibrated value depends on that bound, and the uncalibrated one is
    used.
    """
    at_bound = sum(metric.key in row["at_bound"] for row in rows)
    if not at_bound:
        return metric, ""
    return METRICS[metric.uncalibrated], (
        f"The temperature of {at_bound} of {len(rows)} candidates is at its bound, so {metric.key} after temperature "
        f"scaling is not reliable; candidates are ranked by {metric.uncalibrated} instead."
    )


def choose(rows: Sequence[dict[str, Any]], metric: Metric) -> str:
    """The title of the best row."""
    if any(metric.key not in row["ours"] for row in rows):
        raise ValueError(f"{metric.key} has no value for some candidates; choose another metric with --by.")
    best = (max if metric.better == "higher" else min)(rows, key=lambda row: row["ours"][metric.key]["mean"])
    return str(best["title"])


def _grid(search: Search) -> dict[str, tuple[float, ...]]:
    return {"precision": search.precisions, "rank": search.ranks, "repulsion": search.repulsions}


def _with(method: Method, given: dict[str, float]) -> Method:
    prior: Any = getattr(method, "prior", None)
    if "precision" in given and not hasattr(prior, "precision"):
        raise ValueError(f"{method.title} has no prior precision to tune; give --precisions without a value.")
    for field in given.keys() - {"precision"}:
        if not hasattr(method, field):
            raise ValueError(f"{method.title} has no {field} to tune; omit --{field}s, or give another --method.")
    changes: dict[str, Any] = {field: value for field, value in given.items() if field != "precision"}
    changes |= {"prior": replace(prior, precision=given["precision"])} if "precision" in given else {}
    return replace(method, **changes)  # type: ignore[type-var]
