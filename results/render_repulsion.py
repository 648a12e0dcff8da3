"""Markdown tables of the repulsion study (docs/notes/study_protocol.md)."""

from typing import Any

from render import COMPARISON, Numbers, difference_text, head, markdown

from featureflock.evaluation.metrics.registry import find_metric
from featureflock.evaluation.statistics import mean


def headline(results: dict[str, Any]) -> str:
    """The primary comparison of the repulsion study: feature-WGD tuned vs Deep Ensembles, one row per setting."""
    metrics = [find_metric(key) for key in COMPARISON]
    lines = []
    for entry in results["settings"]:
        cells = [difference_text(metric, entry["differences"].get(metric.key)) for metric in metrics]
        lines.append([entry["setting"], str(entry["seeds"]), *cells])
    note = (
        "feature-WGD with tuned repulsion minus Deep Ensembles: mean, paired by seed, with 95 % confidence interval; "
        "▲ significantly better, ▼ worse, after Holm's correction within the row."
    )
    return markdown(["", "Seeds", *map(head, metrics)], lines) + "\n\n" + note


def repulsion_curve(results: dict[str, Any]) -> str:
    """Differences vs Deep Ensembles by repulsion and number of members, averaged over the networks."""
    points: dict[tuple[str, int], list[Numbers]] = {}
    for row in results["rows"]:
        if "differences" in row:
            points.setdefault((row["title"].partition(",")[0], row["members"]), []).append(row["differences"])
    metrics = [find_metric(key) for key in next(iter(points.values()))[0]]
    lines = [
        [f"{tau} × {members}", *(m.text(mean([n[m.key]["mean"] for n in numbers]).mean, sign=True) for m in metrics)]
        for (tau, members), numbers in sorted(points.items(), key=lambda point: point[0][1])
    ]
    seeds = min(numbers["accuracy"]["seeds"] for point in points.values() for numbers in point)
    widths = len(next(iter(points.values())))
    note = (
        f"feature-WGD minus Deep Ensembles with the same number of members, mean over {widths} networks and {seeds} "
        f"seed{'s' * (seeds > 1)}, on {results['test_examples']:,} test examples and {results['corrupted_examples']:,} "
        "of each corrupted test set."
    )
    return markdown(["", *map(head, metrics)], lines) + "\n\n" + note


def forces(results: dict[str, Any]) -> str:
    """Norms of the terms of feature-WGD's update, at five steps of a training run."""
    steps = results["steps"]
    chosen = [steps[k * (len(steps) - 1) // 4] for k in range(5)]
    heads = ["step", "data gradient", "prior", "repulsion", "cosine of two members' data gradients"]
    keys = ("data", "prior", "repulsion", "cos_data_between_members")
    lines = [[str(step["step"]), *(f"{step[key]:.2f}" for key in keys)] for step in chosen]
    note = f"Norms for a batch, means over members. {results['row']}, seed {results['seed']}."
    return markdown(heads, lines, text_columns=0) + "\n\n" + note


def member_errors(results: dict[str, Any]) -> str:
    """Errors that members share, clean and by severity: means over the seeds that both rows have."""
    rows: dict[str, dict[int, Any]] = {}
    for run in results["runs"]:
        rows.setdefault("feature-WGD" if run["row"].startswith("feature") else "Deep Ensembles", {})[run["seed"]] = run
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in rows.values())))
    keys = {"member_accuracy": "member accuracy, %", "accuracy": "ensemble, %", "same_error": "same error, %"}
    lines = []
    for test_set in ("clean", "severity 1", "severity 3", "severity 5"):
        for title, by_seed in rows.items():
            means = [mean([by_seed[seed]["sets"][test_set][key] for seed in seeds]).mean for key in keys]
            lines.append([test_set, title, *(f"{100 * value:.2f}" for value in means)])
    return markdown(["", "", *keys.values()], lines, text_columns=2) + f"\n\nMeans over {len(seeds)} seeds."


def ece_floor(results: dict[str, Any]) -> str:
    """Measured ECE and cECE beside those of labels drawn from the predictions themselves."""
    heads = ["", "ECE", "ECE, perfectly calibrated", "cECE", "cECE, perfectly calibrated"]
    lines = []
    for run in results["runs"]:
        cells = [
            text
            for numbers in (run["clean"], run["corrupted"])
            for text in (f"{numbers['ece']:.4f}", f"{numbers['floor']:.4f} ± {numbers['sd']:.4f}")
        ]
        lines.append([f"{run['folder'].rpartition('-seed')[0].rpartition('-')[0]}, seed {run['seed']}", *cells])
    clean, corrupted = results["draws"]["clean"], results["draws"]["corrupted"]
    note = f"Perfectly calibrated: mean ± sd of {clean} (clean) and {corrupted} (corrupted) draws of the labels."
    return markdown(heads, lines) + "\n\n" + note
