"""Draw the figures of README.md and docs/ from the JSON files in this folder.

    python results/draw_figures.py

Only docs/images/maps.png is not drawn here: it shows images and class activation maps, which results/ does not hold.
It is images/class-activation-maps.png of `featureflock reproduce cam-similarity --scale laptop`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featureflock.data import two_view_digits

ROOT = Path(__file__).parents[1]
COLOURS = ("#8a8f98", "#3b6fb6", "#d9b44a", "#e0873a", "#b3262e")
VIEWS_SHOWN = ("Deep Ensembles", "shared + prior", "feature-WGD")


def demo_accuracy(results: dict[str, Any]) -> Figure:
    """Accuracy of each method of the demo on each test set, with the standard deviation over seeds."""
    figure = _figure(8, 3.4)
    axes = figure.subplots()
    test_sets = list(results["scores"]["feature-WGD"])
    for k, (method, of) in enumerate(results["scores"].items()):
        x = np.arange(len(test_sets)) + 0.14 * (k - (len(results["scores"]) - 1) / 2)
        means, sds = ([of[t]["accuracy"][stat] for t in test_sets] for stat in ("mean", "sd"))
        axes.errorbar(x, means, sds, fmt="o", ms=6, capsize=3, color=COLOURS[k], label=method)
    axes.set_xticks(range(len(test_sets)), test_sets)
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"Two-view digits: mean ± sd over {results['settings']['seeds']} seeds", loc="left", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), fontsize=8, frameon=False)
    return figure


def demo_views(results: dict[str, Any]) -> Figure:
    """Ten test images as each member sees them: the more a half drives its prediction, the stronger its colour."""
    data = two_view_digits(0)
    images = [data.x_test["clean"][data.y_test == digit][0].numpy() for digit in range(10)]
    colours = dict(zip(results["scores"], COLOURS, strict=True))
    runs = [run for run in results["runs"] if run["seed"] == 0 and run["method"] in VIEWS_SHOWN]
    figure = _figure(8, 0.5 + 2.1 * len(runs))
    for axes, run in zip(figure.subplots(len(runs)), runs, strict=True):
        axes.imshow(_tinted(images, np.array(run["left_shares"]), colours[run["method"]]), interpolation="nearest")
        difference = results["view_difference"][run["method"]]
        text = f"{run['method']}: members' views differ by {difference['mean']:.3f} ± {difference['sd']:.3f}"
        axes.set_title(text, loc="left", fontsize=10)
        members = len(run["left_shares"])
        axes.set_yticks(4.5 + 9 * np.arange(members), [f"member {i + 1}" for i in range(members)], fontsize=8)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.suptitle("Which half drives each member's prediction (seed 0)", x=0.01, ha="left", fontsize=11)
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


def ensemble_sizes(results: dict[str, Any]) -> Figure:
    """Accuracy and NLL by the number of members, with the standard deviation over seeds."""
    figure = _figure(8, 3)
    for axes, key, title, factor in zip(
        figure.subplots(1, 2), ("accuracy", "nll"), ("accuracy, %", "NLL"), (100, 1), strict=True
    ):
        for method, colour in (("Deep Ensembles", COLOURS[1]), ("feature-WGD", COLOURS[4])):
            rows = [row for row in results["rows"] if row["title"] == method]
            means, sds = ([factor * row["ours"][key][stat] for row in rows] for stat in ("mean", "sd"))
            sizes = [row["members"] for row in rows]
            axes.errorbar(sizes, means, sds, fmt="o-", ms=5, capsize=3, color=colour, label=method)
        axes.set_xticks(sizes)
        axes.set_xlabel("members")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "accuracy.png": ("demo.json", demo_accuracy),
    "views.png": ("demo.json", demo_views),
    "two_views.svg": ("two_views.json", single_views),
    "dominoes.svg": ("dominoes.json", single_views),
    "sizes.svg": ("laptop_ensemble_size.json", ensemble_sizes),
}
"""File in docs/images -> results file and the function that draws it."""


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _tinted(images: list[NDArray[np.float32]], left: NDArray[np.float64], colour: str) -> NDArray[np.float64]:
    """Members below each other, images side by side; each half is tinted by its part in the prediction."""
    tint = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    members, count = left.shape
    grid = np.ones((9 * members + 1, 18 * count, 3))
    for i in range(members):
        for k, ink in enumerate(images):
            strength = np.where(np.arange(16) < 8, left[i, k], 1 - left[i, k])[None, :, None]
            background = 1 - strength * (1 - tint)
            grid[9 * i + 1 : 9 * i + 9, 18 * k + 1 : 18 * k + 17] = background * (1 - ink[..., None])
    return grid


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "featureflock", "svg.fonttype": "none"})  # the same bytes each time
    for name, (source, draw) in FIGURES.items():
        results = json.loads((ROOT / "results" / source).read_text())
        metadata = {"Date": None} if name.endswith(".svg") else None
        draw(results).savefig(ROOT / "docs" / "images" / name, dpi=150, metadata=metadata)
        print(f"wrote docs/images/{name}")


if __name__ == "__main__":
    main()
