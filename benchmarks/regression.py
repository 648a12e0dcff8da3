"""Regression: a single network, Deep Ensembles and feature-WGD on diabetes and diamonds, ten seeds each.

    python benchmarks/regression.py --json results/regression.json

Nothing is chosen on the test set. First, learning rate and number of epochs are chosen for Deep Ensembles, by their NLL
on held-out training examples, mean over three seeds, and used for all methods. Then the strength τ of the repulsion of
feature-WGD is chosen in the same way. With these, every method is trained on all training examples and tested.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import write_json

from featureflock.data import Diabetes, Diamonds, HeldOut
from featureflock.evaluation import evaluate_runs
from featureflock.evaluation.metrics.registry import METRICS
from featureflock.methods import DeepEnsembles, FeatureWGD, Single
from featureflock.training import RECIPES, ComputeConfig, Recipe, train
from featureflock.utils.provenance import provenance

HELD_OUT = {"diabetes": 80, "diamonds": 5_000}
RATES, EPOCHS = (0.003, 0.01, 0.03), {"diabetes": (30, 60, 120), "diamonds": (5, 10)}
REPULSIONS = (1.0, 3.0, 10.0, 30.0, 100.0)
SEEDS, SEARCH_SEEDS = range(10), range(3)
COLUMNS = ("rmse", "raw_nll", "raw_crps", "raw_coverage", "raw_calibration_error", "nll", "epistemic_share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    rows, searches, started = [], {}, provenance()  # the commit that is run, whatever is committed meanwhile
    with tempfile.TemporaryDirectory() as folder:
        for name in ("diabetes", "diamonds"):
            recipe, searches[name] = choose_settings(name, Path(folder) / name / "search")
            rows += measure(name, recipe, searches[name]["repulsion"], Path(folder) / name)
            print(table([row for row in rows if row["data"] == name]), flush=True)
    write_json(args.json, {**started, "searches": searches, "rows": rows})


def choose_settings(name: str, folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with the learning rate and number of epochs of the lowest held-out NLL; then τ."""
    data = Diabetes() if name == "diabetes" else Diamonds()
    recipe = replace(RECIPES[name].recipe, data=HeldOut(data, HELD_OUT[name]))
    grid = list(itertools.product(RATES, EPOCHS[name]))
    settings = [replace(recipe, learning_rate=rate, epochs=epochs, method=DeepEnsembles()) for rate, epochs in grid]
    of_settings = [held_out_nll(each, folder) for each in settings]
    best = settings[of_settings.index(min(of_settings))]
    repulsions = [replace(best, method=FeatureWGD(repulsion=tau)) for tau in REPULSIONS]
    of_repulsions = [held_out_nll(each, folder) for each in repulsions]
    tau = REPULSIONS[of_repulsions.index(min(of_repulsions))]
    chosen = {
        "held_out": HELD_OUT[name],
        "seeds": len(SEARCH_SEEDS),
        "deep_ensembles": [
            {"learning_rate": r, "epochs": e, "nll": x} for (r, e), x in zip(grid, of_settings, strict=True)
        ],
        "feature_wgd": [{"repulsion": t, "nll": x} for t, x in zip(REPULSIONS, of_repulsions, strict=True)],
        "learning_rate": best.learning_rate,
        "epochs": best.epochs,
        "repulsion": tau,
    }
    print(name, chosen, flush=True)
    return replace(best, data=data), chosen


def held_out_nll(recipe: Recipe, folder: Path) -> float:
    """NLL on the held-out examples, mean over seeds."""
    key = f"{recipe.learning_rate:g}-{recipe.epochs}-{getattr(recipe.method, 'repulsion', 'none')}"
    return fmean(_train(replace(recipe, seed=seed), folder / f"{key}-{seed}")["test"]["nll"] for seed in SEARCH_SEEDS)


def measure(name: str, recipe: Recipe, tau: float, folder: Path) -> list[dict[str, Any]]:
    """Train every method on all training examples with ten seeds, and test it."""
    methods = {"Single": Single(), "Deep Ensembles": DeepEnsembles(), "feature-WGD, τ = 1": FeatureWGD()}
    if tau != 1:
        methods[f"feature-WGD, τ = {tau:g}"] = FeatureWGD(repulsion=tau)
    folders, titles = [], []
    for title, method in methods.items():
        for seed in SEEDS:
            members = 1 if title == "Single" else recipe.members
            folders.append(folder / f"{title}-{seed}")
            titles.append(title)
            _train(replace(recipe, method=method, members=members, seed=seed), folders[-1])
    groups = evaluate_runs(folders, titles=titles).results.groups
    rows = []
    for group in groups:
        means = {key: group.metrics[key]._asdict() for key in COLUMNS if key in group.metrics}
        paired = {key: group.differences[key]._asdict() for key in COLUMNS if key in group.differences}
        common = {"data": name, "method": group.title, "members": group.members, "seeds": len(group.seeds)}
        rows.append({**common, "metrics": means, "differences": paired})
    return rows


def _train(recipe: Recipe, folder: Path) -> dict[str, Any]:
    return train(recipe, folder, compute=ComputeConfig(checkpoint_minutes=60))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown table: means over seeds, and differences vs Deep Ensembles with 95 % intervals."""
    metrics = [METRICS[key] for key in COLUMNS]
    heads = [metric.title.removeprefix("raw ") if metric.key != "nll" else "calibrated NLL" for metric in metrics]
    lines = [f"| data | method | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for row in rows:
        cells = []
        for metric in metrics:
            value = row["metrics"].get(metric.key)
            cells.append("–" if value is None else f"{metric.text(value['mean'])} ± {metric.text(value['sd'])}")
        lines.append(f"| {row['data']} | {row['method']} | {' | '.join(cells)} |")
        if row["differences"]:
            cells = [_difference(metric, row["differences"].get(metric.key)) for metric in metrics]
            lines.append(f"| | difference vs Deep Ensembles | {' | '.join(cells)} |")
    return "\n".join(lines)


def _difference(metric: Any, value: dict[str, Any] | None) -> str:
    if value is None or value["low"] is None:
        return "–"
    text = f"{metric.text(value['mean'], sign=True)} [{metric.text(value['low'])}, {metric.text(value['high'])}]"
    significant = value["low"] > 0 or value["high"] < 0
    return f"**{text}**" if significant and metric.better else text


if __name__ == "__main__":
    main()
