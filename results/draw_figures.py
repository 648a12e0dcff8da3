"""Draw the figures of README.md and docs/ from the JSON files in this folder.

    python results/draw_figures.py

Only docs/images/maps.png is not drawn here: it shows images and class activation maps, which results/ does not hold.
It is images/class-activation-maps.png of `featureflock reproduce cam-similarity --scale laptop`.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import render_repulsion
from matplotlib.figure import Figure

from featureflock.evaluation.statistics import mean

ROOT = Path(__file__).parents[1]
SIZE_PANELS = {"accuracy": ("accuracy, %", 100), "nll": ("NLL", 1), "corrupted_nll": ("NLL, corrupted images", 1)}
COLOURS = ("#8a8f98", "#3b6fb6", "#d9b44a", "#e0873a", "#b3262e")


def demo(results: dict[str, Any]) -> Figure:
    """What one missing half costs each method of the demo, and how much its members differ, with 95 % intervals."""
    rows = [row for row in results["rows"] if row["title"] != "Single"]
    figure = _figure(9, 2.9)
    panels = {
        "one_view_accuracy": ("accuracy with one half blank, %", 100),
        "one_view_nll": ("NLL with one half blank", 1),
        "view_difference_by_input": ("difference between members\nin the half that they rely on", 1),
    }
    for axes, (key, (title, factor)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for k, row in enumerate(rows):
            numbers = row["ours"][key]
            axes.axhline(factor * rows[0]["ours"][key]["mean"], color=COLOURS[1], lw=0.8, ls=":")
            difference = (row.get("differences") or {}).get(key)
            half = factor * (difference["high"] - difference["low"]) / 2 if difference else 0
            axes.errorbar(k, factor * numbers["mean"], half, fmt="o", ms=7, capsize=4, color=COLOURS[k + 1])
        labels = [row["title"].replace("-", "-\n").replace("Deep ", "Deep\n").replace(", ", "\n") for row in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=8)
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def headline(results: dict[str, Any]) -> Figure:
    """Change of every endpoint vs Deep Ensembles, in % of their value, with 95 % intervals. Left of 0 is better.

    Intervals of ECE that are wider than the others are cut off.
    """
    settings = results["settings"]
    names = {"accuracy": "error", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
    keys = {**names, **{f"corrupted_{key}": f"corrupted {name}" for key, name in names.items()}}
    rows = -(-len(settings) // 3)
    figure = _figure(10, 3 * rows)
    grid = figure.subplots(rows, 3, sharey=True, squeeze=False)
    for axes in grid.flat[len(settings) :]:
        axes.set_visible(False)
    for axes, entry in zip(grid.flat, settings, strict=False):
        axes.axvline(0, color="#8a8f98", lw=1)
        limit = 0.0
        for k, key in enumerate(keys):
            difference, baseline = entry["differences"][key], entry["baseline"][key]["mean"]
            scale = -100 / (1 - baseline) if key.endswith("accuracy") else 100 / baseline
            low, high = difference["low"], difference["high"]
            if low is None or high is None:
                continue
            significant = (difference["p_holm"] or 1) < 0.05
            colour = (COLOURS[1] if scale * difference["mean"] < 0 else COLOURS[4]) if significant else COLOURS[0]
            axes.plot([scale * low, scale * high], [k, k], color=colour, lw=1.6)
            axes.plot(scale * difference["mean"], k, "o", ms=5, color=colour)
            # The intervals of ECE are so wide that nothing else could be read.
            ends = [1.15 * difference["mean"]] if key.endswith("ece") else [1.6 * low, 1.6 * high]
            limit = max(limit, *(abs(scale * end) for end in ends))
        axes.set_xlim(-limit, limit)
        axes.set_yticks(range(len(keys)), list(keys.values()), fontsize=8)
        axes.set_title(f"{entry['setting']}\n{entry['seeds']} seeds", loc="left", fontsize=9)
        axes.set_xlabel("change vs Deep Ensembles, %", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].invert_yaxis()
    return figure


def single_views(results: dict[str, Any]) -> Figure:
    """Each member by its accuracy with one view only; the large mark is the ensemble."""
    runs = {run["folder"]: run for run in results["runs"]}
    groups = results["settings"]
    columns = 3
    figure = _figure(9, 2.9 * -(-len(groups) // columns))
    grid = figure.subplots(-(-len(groups) // columns), columns, sharex=True, sharey=True, squeeze=False)
    for k, (axes, group) in enumerate(zip(grid.flat, groups, strict=False)):
        for run in (runs[name] for name in group["runs"]):
            (first, x), (second, y) = run["views"]["only"].items()
            if run["members"] > 1:
                values = [[100 * a for a in view["member_accuracy"]] for view in (x, y)]
                axes.plot(*values, "o", ms=4, mfc="none", color=COLOURS[k])
            axes.plot(100 * x["raw"]["accuracy"], 100 * y["raw"]["accuracy"], "D", ms=6, color=COLOURS[k])
        axes.set_title(group["title"].replace(" (", "\n("), loc="left", fontsize=8)
        axes.set_xlabel(f"accuracy with only the {first.replace('picture', 'image')}, %", fontsize=8)
        axes.set_ylabel(f"with only the {second.replace('picture', 'image')}, %", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    return figure


def ensemble_sizes(results: dict[str, Any], keys: Sequence[str] = ("accuracy", "nll")) -> Figure:
    """Metrics by the number of members, with the standard deviation over seeds."""
    figure = _figure(4 * len(keys), 3)
    for axes, key in zip(figure.subplots(1, len(keys)), keys, strict=True):
        title, factor = SIZE_PANELS[key]
        for method, colour in (("Deep Ensembles", COLOURS[1]), ("feature-WGD", COLOURS[4])):
            rows = [row for row in results["rows"] if row["title"].partition(" ×")[0] == method]
            means, sds = ([factor * row["ours"][key][stat] for row in rows] for stat in ("mean", "sd"))
            sizes = [row["members"] for row in rows]
            axes.errorbar(sizes, means, sds, fmt="o-", ms=5, capsize=3, color=colour, label=method)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(sizes, map(str, sizes))
        axes.set_xlabel("members")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def particles(results: dict[str, Any]) -> Figure:
    """Particles at the start, without and with repulsion, on the density of the posterior."""
    grid = np.linspace(-0.3, 4.2, 200)
    x, y = np.meshgrid(grid, grid)
    log_density = -((x * y - 1) ** 2) / (2 * results["noise"] ** 2) - results["precision"] * (x**2 + y**2) / 2
    figure = _figure(9, 3.7)
    titles = ("start", "without repulsion: one answer", "with repulsion: the whole posterior")
    for axes, title, points in zip(figure.subplots(1, 3, sharey=True), titles, results["points"].values(), strict=True):
        axes.contourf(x, y, np.exp(log_density - log_density.max()), levels=12, cmap="Blues")
        axes.plot(*np.transpose(points), "o", ms=6, color=COLOURS[3], mec="white", mew=0.8)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("first weight", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_aspect("equal")
    figure.axes[0].set_ylabel("second weight", fontsize=8)
    return figure


def strength(results: dict[str, Any]) -> Figure:
    """What a stronger repulsion does to members and ensemble on validation images, with standard errors over seeds."""
    chosen = [
        candidate
        for candidate in results["methods"][0]["candidates"]
        if candidate["values"].get("method.prior.precision") == 0.01
    ]
    chosen.sort(key=lambda candidate: candidate["values"]["method.repulsion"])
    taus = [candidate["values"]["method.repulsion"] for candidate in chosen]
    panels = {
        "disagreement": ("members disagree, % of images", 100),
        "member_accuracy": ("accuracy of a single member, %", 100),
        "accuracy": ("accuracy of the ensemble, %", 100),
    }
    figure = _figure(9, 2.7)
    for axes, (key, (title, factor)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        values = [[factor * numbers[key] for numbers in candidate["seeds"].values()] for candidate in chosen]
        means = [np.mean(of) for of in values]
        errors = [np.std(of, ddof=1) / len(of) ** 0.5 for of in values]
        axes.errorbar(range(len(taus)), means, errors, fmt="o-", ms=6, capsize=4, color=COLOURS[4])
        axes.set_xticks(range(len(taus)), [f"τ = {tau:g}" for tau in taus], fontsize=8)
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def repulsion_curve(results: dict[str, Any]) -> Figure:
    """Differences vs Deep Ensembles by repulsion τ, for three widths; dashed: 5 members, bars: standard errors."""
    panels = {
        "accuracy": "accuracy, points",
        "nll": "NLL",
        "brier": "Brier",
        "ece": "ECE",
        "disagreement": "disagreement, points",
        "corrupted_accuracy": "cA, points",
        "corrupted_nll": "cNLL",
        "corrupted_brier": "cBrier",
        "corrupted_ece": "cECE",
        "member_accuracy": "member accuracy, points",
    }
    curves: dict[str, dict[str, list[dict[str, float]]]] = {}
    for (network, members, method), by_seed in render_repulsion.gains(results).items():
        curves.setdefault(f"{network} × {members}", {})[method.removeprefix("τ = ")] = list(by_seed.values())
    widths = list(dict.fromkeys(network.partition(" ×")[0] for network in curves))
    figure = _figure(13, 5)
    for axes, (key, title) in zip(figure.subplots(2, 5).flat, panels.items(), strict=True):
        axes.axhline(0, color=COLOURS[0], lw=1)
        factor = 100 if title.endswith("points") else 1
        for network, points in curves.items():
            means = [mean([factor * gains[key] for gains in of]) for of in points.values()]
            colour = COLOURS[1:][widths.index(network.partition(" ×")[0])]
            fewer = network.endswith("× 5")
            axes.errorbar(
                list(points),
                [of.mean for of in means],
                [(of.sd or 0) / of.seeds**0.5 for of in means],
                ls="--" if fewer else "-",
                marker="o",
                ms=4,
                elinewidth=1,
                color=colour,
                mfc="white" if fewer else colour,
                label=network,
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes[5:]:
        axes.set_xlabel("repulsion τ", fontsize=8)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "demo.png": ("demo_study.json", demo),
    "headline.svg": ("repulsion_headline.json", headline),
    "two_views.svg": ("two_views.json", single_views),
    "dominoes.svg": ("dominoes.json", single_views),
    "particles.png": ("particles.json", particles),
    "strength.svg": ("tuning_two_view_digits.json", strength),
    "sizes.svg": ("laptop_ensemble_size.json", ensemble_sizes),
    "repulsion_curve.svg": ("repulsion_strength.json", repulsion_curve),
    "tuned_sizes.svg": ("repulsion_size.json", partial(ensemble_sizes, keys=("accuracy", "nll", "corrupted_nll"))),
}
"""File in docs/images -> results file and the function that draws it."""


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "featureflock", "svg.fonttype": "none"})  # the same bytes each time
    for name, (source, draw) in FIGURES.items():
        results = json.loads((ROOT / "results" / source).read_text())
        metadata = {"Date": None} if name.endswith(".svg") else None
        draw(results).savefig(ROOT / "docs" / "images" / name, dpi=150, metadata=metadata)
        print(f"wrote docs/images/{name}")


if __name__ == "__main__":
    main()
