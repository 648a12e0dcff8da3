"""Markdown tables of the result files in this folder.

Titles and number formats come from the metric registry. The files keep the words of the version that wrote them;
`current_words` translates the labels among them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from featureflock.corruptions import CORRUPTIONS, SEVERITIES
from featureflock.evaluation.metrics.registry import Metric, find_metric
from featureflock.evaluation.statistics import mean

Numbers = Mapping[str, Any]

COMPARISON = (
    *("accuracy", "nll", "brier", "ece"),
    *("corrupted_accuracy", "corrupted_nll", "corrupted_brier", "corrupted_ece"),
)
SEARCH = ("accuracy", "nll", "brier", "ece", "member_accuracy", "disagreement")
ABLATION = "feature-MAP"
MIN_SEEDS = 3
"""Fewer seeds give no mark of significance."""
WORDS = {
    "making all": "generating all",
    "pictures, reckoned": "images, estimated",
    "picture": "image",
    ", own work": ", method only",
    ", whole steps": ", whole step",
    "train over the ordinary loop": "train, speed-up over a plain loop",
    "share of the machine's peak": "fraction of the machine's peak",
    "2 processes over one, time": "time of 2 processes relative to one",
    "feature-WGD over Deep Ensembles, time": "time of feature-WGD relative to Deep Ensembles",
    "feature-WGD over Deep Ensembles": "feature-WGD relative to Deep Ensembles",
    "time a member over n": "time per member relative to n",
    "time over n": "time relative to n",
    "peak of a step over one member's": "peak memory of a step relative to one member",
    "time over sequential": "time relative to sequential",
    "prediction over a plain loop": "prediction, speed-up over a plain loop",
    "largest difference of a probability": "largest difference in probability",
    "reading included": "including reading",
    "plain loops over ours, time": "speed-up over plain loops",
    "beyond import torch": "on top of import torch",
    "waiting included": "including waiting",
    "gathered member by member, time over one gather": "gather per member, time relative to one gather",
    "interface over those of a ring": "interface relative to a ring",
    "their gradients, by PyTorch": "convolutions, backward, PyTorch",
    "convolutions and gradients of their inputs, Winograd's form": "convolutions and their input gradients, Winograd",
    "gradients of weights, by our kernel": "weight gradients, C kernel",
    "BatchNorm, ReLU, sums": "BatchNorm, ReLU, additions",
    "all else": "everything else",
}
"""Label in a file -> label in the tables."""
KEYS = {
    "what": "name",
    "wanted": "target",
    "setup": "options",
    "setting": "configuration",
    "products": "flops",
    "pictures_a_second": "images_per_second",
    "ordinary": "plain",
    "weights of a member": "weights per member",
    "members axis: features of all": "members axis: all features",
    "gradients of all": "all gradients",
    "weight-WGD's gathers of all": "weight-WGD: all gathers",
    "head of all, ms": "head, ms",
}
"""Key of a benchmark's row in a file -> key in this version."""


def current_words(text: str) -> str:
    """Labels of an older version in the words of this one."""
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return text


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table whose columns are right-aligned, except for the first `text_columns`."""
    rules = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rules, *rows))


def upgrade(results: dict[str, Any]) -> dict[str, Any]:
    """Evaluation results with the keys of schema version 1; files without a version have other names for some."""
    if "schema_version" in results or "groups" in results:
        return results
    ablation = {"against_ablation": [_group(group) for group in results.get("against_ablation", ())]}
    return {
        **{key: value for key, value in results.items() if key not in ("settings", "conditions")},
        "runs": [{"name": run["folder"], **run} for run in results["runs"]],
        "groups": [_group(group) for group in results["settings"]],
        "test_sets": [{"name": name} for name in results["conditions"]],
        **(ablation if "against_ablation" in results else {}),
    }


def evaluation(results: dict[str, Any]) -> str:
    """Results of `featureflock evaluate`: the mean of each metric, then the differences vs Deep Ensembles."""
    results = upgrade(results)
    groups = results["groups"]
    metrics = [find_metric(key) for key in COMPARISON if any(key in group["metrics"] for group in groups)]
    heads = ["Method", "Members", "Seeds", *map(head, metrics)]
    rows = [
        [group["title"], str(group["members"]), str(len(group["seeds"])), *cells]
        for group, cells in zip(groups, _means([group["metrics"] for group in groups], metrics), strict=True)
    ]
    if any("deep_ensemble_equivalent" in group for group in groups):
        heads.append("DEE ↑")
        for row, cell in zip(rows, _equivalents(groups), strict=True):
            row.append(cell)
    return "\n\n".join(
        [
            markdown(heads, rows),
            _means_note(groups, [test["name"] for test in results["test_sets"]]),
            *_differences(groups, metrics),
        ]
    )


def views(results: dict[str, Any]) -> str:
    """Results of an evaluation on data with two views: means, differences vs Deep Ensembles and vs feature-MAP."""
    results = upgrade(results)
    groups = results["groups"]
    names = [test["name"].removeprefix("only-") for test in results["test_sets"] if test["name"].startswith("only-")]
    metrics = [find_metric("accuracy"), *_view_metrics(*names)]
    means = _means([group["metrics"] for group in groups], metrics)
    rows = [[group["title"], *cells] for group, cells in zip(groups, means, strict=True)]
    *_, ablation = _differences(results["against_ablation"], metrics)[:1]
    return "\n\n".join(
        [
            markdown(["Method", *map(head, metrics)], rows),
            _means_note(groups, ()),
            *_differences(groups, metrics),
            ablation,
            f"Paired differences vs {ABLATION}, in the same way: the effect of the repulsion.",
        ]
    )


def study(results: dict[str, Any]) -> str:
    """Results of `featureflock reproduce`: each row, its difference vs Deep Ensembles, and the paper's numbers."""
    rows, lines = results["rows"], []
    metrics = [find_metric(key) for key in dict.fromkeys(key for row in rows for key in row["ours"])]
    for row, means in zip(rows, _means([row["ours"] for row in rows], metrics), strict=True):
        lines.append([row["title"], str(row["members"]), *means])
        if row.get("differences"):
            cells = [difference_text(metric, row["differences"].get(metric.key)) for metric in metrics]
            lines.append([f"difference vs {row['against']}", "", *cells])
        if row["paper"]:
            lines.append(["paper", "", *(row["paper"].get(metric.key, "") for metric in metrics)])
    parts = [markdown(["", "Members", *map(head, metrics)], lines), _study_note(results, metrics)]
    for baseline, others in results.get("against", {}).items():
        heads = [f"difference vs {baseline}", *map(head, metrics)]
        found = [
            [title, *(difference_text(m, numbers.get(m.key)) for m in metrics)] for title, numbers in others.items()
        ]
        parts.append(markdown(heads, found))
    return "\n\n".join(parts)


def fuzz(results: dict[str, Any]) -> str:
    """Counts of `make fuzz`."""
    columns = ("tried", "results", "refused", "faults")
    lines = [[row["target"], *(f"{row[name]:,}" for name in columns)] for row in results["rows"]]
    lines.append(["all", *(f"{sum(row[name] for row in results['rows']):,}" for name in columns)])
    return markdown(["target", *columns], lines)


def searches(results: dict[str, Any]) -> str:
    """Searches of `featureflock tune --reference`: Deep Ensembles, then each candidate's difference from them."""
    metrics = [find_metric(key) for key in SEARCH]
    heads = ["images", "epochs", "batch", "", "seeds", "training accuracy, %", *(metric.title for metric in metrics)]
    lines = []
    for row in results["rows"]:
        fitted = "" if row["train_accuracy"] is None else f"{100 * row['train_accuracy']:.1f}"
        if row["differences"] is None:
            cells = [metric.text(row["ours"][metric.key]["mean"]) for metric in metrics]
        else:
            cells = [difference_text(metric, row["differences"][metric.key]) for metric in metrics]
        about = (f"{row['pictures']:,}", row["epochs"], row["batch"], row["title"], row["seeds"], fitted)
        lines.append([*map(str, about), *cells])
    return markdown(heads, lines, text_columns=0)


def tuning(results: dict[str, Any]) -> str:
    """A search of `featureflock tune`: the candidates of each method, the best first."""
    parts = []
    for method in results["methods"]:
        candidates = [each for each in method["candidates"] if each["seeds"]]
        keys = dict.fromkeys([method["by"], *next(iter(candidates[0]["seeds"].values()))])
        metrics = [find_metric(key) for key in keys]
        by_seeds: dict[int, list[Any]] = {}  # means over different seeds are not compared
        for each in candidates:
            by_seeds.setdefault(len(each["seeds"]), []).append(each)
        lines = [
            [*(f"{value:g}" for value in each["values"].values()), str(seeds), *means]
            for seeds, group in by_seeds.items()
            for each, means in zip(group, _means([_mean_numbers(each, keys) for each in group], metrics), strict=True)
        ]
        names = [field.split(".")[-1].replace("_", " ") for field in candidates[0]["values"]]
        parts.append(markdown([*names, "seeds", *map(head, metrics)], lines, text_columns=0))
    return "\n\n".join(parts)


def _mean_numbers(candidate: Numbers, keys: Iterable[str]) -> Numbers:
    return {key: mean([run[key] for run in candidate["seeds"].values()])._asdict() for key in keys}


def training_runs(results: dict[str, Any]) -> str:
    """Test scores of finished runs of `featureflock train`, by method."""
    lines = [
        [
            method,
            str(len(row["seeds"])),
            *(f"{row[key]['mean']:.2f} ± {row[key]['sd']:.2f}" for key in ("accuracy", "member_accuracy")),
            f"{row['nll']['mean']:.4f} ± {row['nll']['sd']:.4f}",
        ]
        for method, row in results["summary"].items()
    ]
    return markdown(["method", "seeds", "test accuracy, %", "member accuracy, %", "NLL"], lines)


def _group(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "baseline": group.get("against")}


def _differences(groups: list[dict[str, Any]], metrics: list[Metric]) -> list[str]:
    compared = [group for group in groups if group.get("differences")]
    if not compared:
        return []
    metrics = [metric for metric in metrics if any(metric.key in group["differences"] for group in compared)]
    rows = [
        [g["title"], *(difference_text(metric, g["differences"].get(metric.key)) for metric in metrics)]
        for g in compared
    ]
    (seeds,) = {difference["seeds"] for group in compared for difference in group["differences"].values()}
    (baseline,) = {group["baseline"] for group in compared}
    note = (
        f"Mean of the paired differences vs {baseline} (same seed) over {seeds} seeds, with the 95 % confidence "
        "interval (Student's t). ▲ significantly better, ▼ significantly worse: the interval excludes 0."
    )
    return [markdown([f"difference vs {baseline}", *map(head, metrics)], rows), note]


def difference_text(metric: Metric, difference: Numbers | None) -> str:
    """The mean, its interval and, if it is significant, a mark."""
    return "–" if difference is None else interval_text(metric, difference) + significance_mark(metric, difference)


def interval_text(metric: Metric, difference: Numbers) -> str:
    """The mean and its 95 % interval; the mean alone if there is one seed or all differences are equal."""
    text = metric.text(difference["mean"], sign=True)
    if not _has_interval(difference):
        return text
    return f"{text} [{metric.text(difference['low'])}, {metric.text(difference['high'])}]"


def significance_mark(metric: Metric, difference: Numbers) -> str:
    """▲ for significantly better, ▼ for significantly worse."""
    if not metric.better or difference["seeds"] < MIN_SEEDS or not _has_interval(difference):
        return ""
    low, corrected = difference["low"], difference.get("p_holm")
    if not (not low <= 0 <= difference["high"] if corrected is None else corrected < 0.05):
        return ""
    return " ▲" if (low > 0) == (metric.better == "higher") else " ▼"


def _has_interval(difference: Numbers) -> bool:
    return difference["low"] is not None and difference["high"] - difference["low"] >= 1e-12


def _means(groups: list[Numbers], metrics: list[Metric]) -> list[list[str]]:
    """Mean ± standard deviation, the best of each column in bold; equal as printed is equally good."""
    columns = []
    for metric in metrics:
        values = {k: group[metric.key]["mean"] for k, group in enumerate(groups) if metric.key in group}
        best = ""
        if metric.better and len(values) > 1:
            best = metric.text((max if metric.better == "higher" else min)(values.values()))
        cells = []
        for k, group in enumerate(groups):
            if k not in values:
                cells.append("–")
                continue
            mean, sd = metric.text(values[k]), group[metric.key]["sd"]
            cell = mean if sd is None else f"{mean} ± {metric.text(sd)}"
            cells.append(f"**{cell}**" if mean == best else cell)
        columns.append(cells)
    return [list(row) for row in zip(*columns, strict=True)]


def _equivalents(groups: list[dict[str, Any]]) -> list[str]:
    """Deep-ensemble equivalents; "more than 5" is the best, if there is one."""
    values = [group.get("deep_ensemble_equivalent") for group in groups]
    texts = [
        "–" if value is None else value.replace("more than", ">") if isinstance(value, str) else f"{value:.1f}"
        for value in values
    ]
    known = {text: float("inf") if text.startswith(">") else float(text) for text in texts if text != "–"}
    best = max(known, key=lambda text: known[text], default="")
    return [f"**{text}**" if text == best and len(known) > 1 else text for text in texts]


def _means_note(groups: list[dict[str, Any]], test_sets: Iterable[str]) -> str:
    (seeds,) = {len(group["seeds"]) for group in groups}
    corrupted = [name for name in test_sets if name.rpartition("-")[0] in CORRUPTIONS]
    every = len(CORRUPTIONS) * len(SEVERITIES)
    note = f"Mean ± standard deviation over {seeds} seeds. The best are bold."
    if 0 < len(corrupted) < every:
        note += f" cA, cNLL, cBrier and cECE are means over {len(corrupted)} corrupted test sets, not over all {every}."
    return note


def _study_note(results: dict[str, Any], metrics: list[Metric]) -> str:
    by_row = {row["title"]: max(numbers["seeds"] for numbers in row["ours"].values()) for row in results["rows"]}
    seeds = max(by_row.values())
    fewer = ", ".join(f"{title}: {count}" for title, count in by_row.items() if count < seeds)
    corrupted = results["corrupted_examples"] and any(metric.group in ("corrupted", "severity") for metric in metrics)
    found = [difference for row in results["rows"] for difference in (row.get("differences") or {}).values()]
    corrected = any(difference.get("p_holm") is not None for difference in found)
    parts = [
        f"Ours at {results['scale']} scale, the paper's at full scale."
        if any(row["paper"] for row in results["rows"])
        else "",
        f"Mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}{f' ({fewer})' if fewer else ''}, "
        f"{results['test_examples']:,} test examples"
        + (f", {results['corrupted_examples']:,} in each corrupted test set." if corrupted else "."),
        "Differences: paired by seed, 95 % confidence interval"
        + ("; ▲ significantly better, ▼ worse" if seeds >= MIN_SEEDS else "")
        + (", the eight endpoints after Holm's correction." if corrected else "."),
        "Best mean of ours in bold.",
    ]
    return " ".join(filter(None, parts))


def _view_metrics(first: str, second: str) -> list[Metric]:
    keys = [f"only_{view}_{key}" for view in (first, second) for key in ("accuracy", "best_member_accuracy")]
    keys += ["covered_views", f"{first}_share", "view_difference_by_input", "view_difference_on_average"]
    return [find_metric(key) for key in keys]


def head(metric: Metric) -> str:
    return f"{current_words(metric.title)} {({'higher': '↑', 'lower': '↓'}).get(metric.better, '')}".strip()


def precision(results: dict[str, Any]) -> str:
    """bfloat16 and float32, and their paired differences, for each network."""
    rows = []
    for name, network in results["networks"].items():
        metrics = [find_metric(key) for key in network["differences"]]
        means = _means([*network["means"].values()], metrics)
        rows += [[f"{name}, {precision}", *cells] for precision, cells in zip(network["means"], means, strict=True)]
        rows.append(
            ["difference", *(difference_text(metric, network["differences"][metric.key]) for metric in metrics)]
        )
    note = f"Mean ± standard deviation over {len(results['seeds'])} seeds; paired differences with 95 % intervals."
    return f"{markdown(['', *map(head, metrics)], rows)}\n\n{note}"
