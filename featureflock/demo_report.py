"""What the demo shows: a table, a verdict, two pictures, and a JSON file with every number."""

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from scipy.special import stdtrit  # scipy.stats takes a second to import

from featureflock.data import two_view_digits
from featureflock.demo import METHODS, Outcome, Settings
from featureflock.utils.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {"accuracy": ("accuracy, %", 1), "nll": ("NLL", 3), "disagreement": ("disagreement, %", 1)}
PAIRED = {"accuracy": ("accuracy, %", 2), "nll": ("NLL", 3)}
OURS, RIVALS = "feature-WGD", ("Deep Ensembles", "shared + prior")
COLOURS = dict(zip(METHODS, ("#8a8f98", "#3b6fb6", "#d9b44a", "#e0873a", "#b3262e"), strict=True))


def summarise(outcomes: list[Outcome], settings: Settings) -> dict[str, Any]:
    """Every score with its mean and deviation over seeds, and paired differences with 95 % intervals."""

    def values(method: str, test: str, name: str) -> list[float]:
        return [o.scores[test][name] for o in outcomes if o.method == method]

    return {
        "settings": asdict(settings),
        "methods": {name: repr(method) for name, method in METHODS.items()},
        "scores": {m: {t: {s: _mean_sd(values(m, t, s)) for s in SCORES} for t in outcomes[0].scores} for m in METHODS},
        "view_difference": {m: _mean_sd([o.view_difference for o in outcomes if o.method == m]) for m in METHODS},
        f"{OURS} minus": {
            rival: {
                t: {s: _paired(values(OURS, t, s), values(rival, t, s)) for s in PAIRED} for t in outcomes[0].scores
            }
            for rival in RIVALS
        },
        "provenance": provenance(),
    }


def tables(summary: dict[str, Any]) -> list[Table]:
    """The comparison, and the paired differences, for a terminal."""
    seeds = summary["settings"]["seeds"]
    tests = list(next(iter(summary["scores"].values())))
    scores = Table(title=f"Two-view digits: mean ± sd over {seeds} seeds")
    paired = Table(title=f"{OURS} minus …: mean of paired differences ± 95 % interval")
    for table in (scores, paired):
        table.title_justify, table.box, table.padding = "left", box.SIMPLE_HEAD, (0, 0)
        table.add_column("", no_wrap=True)
        for test in tests:
            table.add_column(test, justify="right", no_wrap=True)
    for score, (title, digits) in SCORES.items():
        scores.add_row(f"[bold]{title}")
        for method, of in summary["scores"].items():
            if not (score == "disagreement" and method == "Single"):
                cells = [f"{of[t][score]['mean']:.{digits}f} ± {of[t][score]['sd']:.{digits}f}" for t in tests]
                scores.add_row(method, *cells, style="bold" if method == OURS else "")
        scores.add_section()
    for score, (title, digits) in PAIRED.items():
        paired.add_row(f"[bold]{title}")
        for rival, of in summary[f"{OURS} minus"].items():
            cells = [f"{of[t][score]['mean']:+.{digits}f} ± {of[t][score]['ci95']:.{digits}f}" for t in tests]
            paired.add_row(rival, *cells)
        paired.add_section()
    return [scores, paired]


def verdict(summary: dict[str, Any]) -> str:
    """Who wins by how much, in words; a difference counts where its 95 % interval leaves out zero."""
    lines = []
    for rival, of in summary[f"{OURS} minus"].items():
        for score, (title, digits) in PAIRED.items():
            sign = 1 if score == "accuracy" else -1
            sides: dict[str, list[str]] = {"better on": [], "worse on": [], "no clear difference on": []}
            for test, d in of.items():
                clear = abs(d[score]["mean"]) > d[score]["ci95"]
                word = "better on" if sign * d[score]["mean"] > 0 else "worse on"
                word = word if clear else "no clear difference on"
                sides[word].append(test + (f" ({d[score]['mean']:+.{digits}f})" if clear else ""))
            words = "; ".join(f"{word} {', '.join(names)}" for word, names in sides.items() if names)
            lines.append(f"{OURS} against {rival}, {title.removesuffix(', %')}: {words}.")
    differences = [
        f"{d['mean']:.3f} ± {d['sd']:.3f} in {m}" for m, d in summary["view_difference"].items() if m != "Single"
    ]
    lines.append(f"Members' views differ by {', '.join(differences)}.")
    return "\n".join(lines)


def write_report(outcomes: list[Outcome], summary: dict[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and the two pictures."""
    runs = [o._asdict() for o in outcomes]
    paths = [folder / name for name in ("report.md", "accuracy.png", "views.png", "results.json")]
    accuracy_picture(summary).savefig(paths[1], dpi=150)
    views_picture(outcomes, summary).savefig(paths[2], dpi=150)
    paths[3].write_text(json.dumps(summary | {"runs": runs}, indent=1) + "\n")
    body = [*map(markdown, tables(summary)), "- " + verdict(summary).replace("\n", "\n- ")]
    pictures = ["![Accuracy of each method on each test set](accuracy.png)", "![What members look at](views.png)"]
    paths[0].write_text("\n\n".join(["# featureflock demo", *body, *pictures]) + "\n")
    return paths


def accuracy_picture(summary: dict[str, Any]) -> "Figure":
    """Accuracy of each method on each test set, with the deviation over seeds."""
    figure = _figure(3.4)
    axes = figure.subplots()
    tests = list(summary["scores"][OURS])
    for k, (method, of) in enumerate(summary["scores"].items()):
        x = np.arange(len(tests)) + 0.14 * (k - (len(METHODS) - 1) / 2)
        means, sds = ([of[t]["accuracy"][stat] for t in tests] for stat in ("mean", "sd"))
        axes.errorbar(x, means, sds, fmt="o", ms=6, capsize=3, color=COLOURS[method], label=method)
    axes.set_xticks(range(len(tests)), tests)
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"Two-view digits: mean ± sd over {summary['settings']['seeds']} seeds", loc="left", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(METHODS), fontsize=8, frameon=False)
    return figure


def views_picture(outcomes: list[Outcome], summary: dict[str, Any]) -> "Figure":
    """Ten test pictures as each member sees them: the more a half drives its prediction, the stronger its colour."""
    data = two_view_digits(0)
    pictures = [data.x_test["clean"][data.y_test == digit][0].numpy() for digit in range(10)]
    shown = [o for o in outcomes if o.seed == 0 and o.method in (*RIVALS, OURS)]
    figure = _figure(0.5 + 2.1 * len(shown))
    for axes, outcome in zip(figure.subplots(len(shown)), shown, strict=True):
        grid = _tinted(pictures, np.array(outcome.left_shares), COLOURS[outcome.method])
        axes.imshow(grid, interpolation="nearest")
        difference = summary["view_difference"][outcome.method]
        axes.set_title(
            f"{outcome.method}: members' views differ by {difference['mean']:.3f} ± {difference['sd']:.3f}",
            loc="left",
            fontsize=10,
        )
        members = len(outcome.left_shares)
        axes.set_yticks(4.5 + 9 * np.arange(members), [f"member {i + 1}" for i in range(members)], fontsize=8)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.suptitle("Which half drives each member's prediction (seed 0)", x=0.01, ha="left", fontsize=11)
    return figure


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure  # takes a second, which --help need not wait for

    return Figure(figsize=(8, height), layout="constrained")


def _tinted(pictures: list[NDArray[np.float32]], left_shares: NDArray[np.float64], colour: str) -> NDArray[np.float64]:
    """Members below each other, pictures beside each other; ink on paper whose halves are tinted by their shares."""
    tint = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    members, count = left_shares.shape
    grid = np.ones((9 * members + 1, 18 * count, 3))
    for i in range(members):
        for k, ink in enumerate(pictures):
            strength = np.where(np.arange(16) < 8, left_shares[i, k], 1 - left_shares[i, k])[None, :, None]
            paper = 1 - strength * (1 - tint)
            grid[9 * i + 1 : 9 * i + 9, 18 * k + 1 : 18 * k + 17] = paper * (1 - ink[..., None])
    return grid


def markdown(table: Table) -> str:
    rows = [[str(column.header) for column in table.columns]]
    rows += [list(cells) for cells in zip(*(list(column.cells) for column in table.columns), strict=True)]
    cells = [[str(c).replace("[bold]", "").strip() for c in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|---|" + "---:|" * (len(table.columns) - 1))
    return f"{table.title}\n\n" + "\n".join(lines)


def _mean_sd(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values)}


def _paired(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Mean and half width of the 95 % interval (Student's t) of the differences on the same seeds."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"mean": statistics.fmean(differences), "ci95": float(stdtrit(len(differences) - 1, 0.975)) * error}
