"""Markdown tables of the repulsion study (docs/notes/study_protocol.md)."""

from collections.abc import Sequence
from typing import Any

from render import COMPARISON, Numbers, difference_text, head, interval_text, markdown, significance_mark

from featureflock.evaluation.metrics.registry import Metric, find_metric
from featureflock.evaluation.statistics import mean, paired_difference


def headline(results: dict[str, Any]) -> str:
    """The primary comparison of the repulsion study: feature-WGD tuned vs Deep Ensembles, one row per setting."""
    metrics = [find_metric(key) for key in COMPARISON]
    lines = []
    for entry in results["settings"]:
        differences = [(metric, entry["differences"][metric.key]) for metric in metrics]
        cells = [metric.text(of["mean"], sign=True) + significance_mark(metric, of) for metric, of in differences]
        lines.append([entry["setting"], str(entry["seeds"]), *cells])
    note = (
        "feature-WGD with tuned repulsion minus Deep Ensembles, mean over seeds; ▲ significantly better, ▼ worse, "
        "after Holm's correction within the row. Intervals: in the figure and in the tables below."
    )
    return markdown(["", "Seeds", *map(head, metrics)], lines) + "\n\n" + note


def repulsion_curve(results: dict[str, Any]) -> str:
    """Differences vs Deep Ensembles by repulsion and number of members; each seed is the mean over the networks."""
    curves = gains(results)
    networks = {network for network, _, _ in curves}
    points = dict.fromkeys((method, members) for _, members, method in curves)
    metrics = [find_metric(key) for key in _metrics(results)]
    lines = []
    for method, members in sorted(points, key=lambda point: point[1]):
        of = [curves[network, members, method] for network in networks]
        cells = (difference_text(metric, _over_seeds(metric.key, of)) for metric in metrics)
        lines.append([f"{method} × {members}", *cells])
    note = f"feature-WGD minus Deep Ensembles with the same number of members, mean over {len(networks)} networks"
    seeds = _seeds_note(results, len(next(iter(curves.values()))))
    return markdown(["", *map(head, metrics)], lines) + f"\n\n{note} and {seeds}"


def gains_by_width(results: dict[str, Any]) -> str:
    """Differences vs Deep Ensembles by the width of the network, at τ = 10 with 10 members, and how they change."""
    widths = {network: of for (network, members, method), of in gains(results).items() if (members, method) == WIDTHS}
    metrics = [find_metric(key) for key in _metrics(results)]
    lines = [
        [network, *(difference_text(metric, _over_seeds(metric.key, [of])) for metric in metrics)]
        for network, of in widths.items()
    ]
    narrow, *_, wide = widths
    cells = (difference_text(metric, _over_seeds(metric.key, [widths[wide]], widths[narrow])) for metric in metrics)
    lines.append([f"{wide} minus {narrow}", *cells])
    members, method = WIDTHS
    note = f"feature-WGD with {method} × {members} minus Deep Ensembles × {members}, mean over"
    return markdown(["", *map(head, metrics)], lines) + f"\n\n{note} {_seeds_note(results, len(widths[wide]))}"


WIDTHS = (10, "τ = 10")
"""Members and row of the comparison of widths."""


def gains(results: dict[str, Any]) -> dict[tuple[str, int, str], dict[int, Numbers]]:
    """By network, members and method, then by seed: differences of the metrics vs Deep Ensembles.

    Only of the seeds that all rows have.
    """
    runs: dict[tuple[str, int, str], dict[int, Numbers]] = {}
    for run in results["runs"]:
        method, _, network = run["title"].rpartition(" × ")[0].partition(", ")
        runs.setdefault((network, run["members"], method), {})[run["seed"]] = run["numbers"]
    seeds = sorted(set.intersection(*map(set, runs.values())))
    differences = {}
    for (network, members, method), ours in runs.items():
        if method != "Deep Ensembles":
            theirs = runs[network, members, "Deep Ensembles"]
            differences[network, members, method] = {
                seed: {key: ours[seed][key] - theirs[seed][key] for key in _metrics(results)} for seed in seeds
            }
    return differences


def _metrics(results: dict[str, Any]) -> list[str]:
    return list(results["rows"][0]["ours"])


def _over_seeds(
    key: str, several: Sequence[dict[int, Numbers]], than: dict[int, Numbers] | None = None
) -> dict[str, Any] | None:
    """The mean of several differences, with `than` minus that one, and its interval over seeds."""
    ours = {seed: mean([of[seed][key] for of in several]).mean for seed in several[0]}
    difference = paired_difference(ours, {seed: than[seed][key] if than else 0.0 for seed in ours})
    return difference and difference._asdict()


def _seeds_note(results: dict[str, Any], seeds: int) -> str:
    return (
        f"{seeds} seed{'s' * (seeds > 1)}, on {results['test_examples']:,} test examples and "
        f"{results['corrupted_examples']:,} of each corrupted test set"
        + (", with 95 % confidence interval over seeds, not corrected." if seeds > 1 else ".")
    )


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


def claims(results: dict[str, Any]) -> str:
    """Differences that test the paper's claims, with their intervals; ✓ supports the claim, ✗ contradicts it."""
    keys = [key for claim in results["claims"] for of in claim["comparisons"] for key in of["differences"]]
    metrics = [find_metric(key) for key in dict.fromkeys(keys)]
    lines = []
    for claim in results["claims"]:
        for k, comparison in enumerate(claim["comparisons"]):
            cells = [_evidence(metric, comparison["differences"].get(metric.key)) for metric in metrics]
            lines.append(["" if k else claim["claim"], comparison["title"], *cells])
    note = (
        "Differences with 95 % confidence interval over seeds, not corrected. ✓: the interval supports the claim; "
        "✗: it contradicts the claim; neither: undecided. Equal: within 0.1 points or 0.002."
    )
    return markdown(["claim", "measured", *map(head, metrics)], lines, text_columns=2) + "\n\n" + note


def _evidence(metric: Metric, difference: Numbers | None) -> str:
    if difference is None:
        return ""
    marks = {"supported": " ✓", "contradicted": " ✗", "undecided": ""}
    return interval_text(metric, difference) + marks[difference["verdict"]]
