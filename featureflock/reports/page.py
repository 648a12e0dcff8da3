"""The report as one self-contained HTML page: it makes no request, and all text is escaped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from featureflock.evaluation.results import EvaluationResults, RunResult
from featureflock.evaluation.runs import flatten
from featureflock.reports import figures, tables
from featureflock.reports.dot_plot import metric_dots
from featureflock.reports.findings import findings, tiles
from featureflock.reports.images import DisputedImages, ImageFigure, cam_figure, disputed_images
from featureflock.reports.plots import Figure, symbol
from featureflock.reports.robustness_tables import corruption_table, ood_table
from featureflock.reports.rows import report_rows
from featureflock.reports.svg import COLOURS
from featureflock.reports.tables import Table, metric_table, metrics_in, plural
from featureflock.reports.verdict import verdict
from featureflock.reports.views import view_figure, view_tables

_HERE = Path(__file__).parent
Part = Table | Figure | ImageFigure | DisputedImages
_Facts = list[tuple[str, str]]


class Section(NamedTuple):
    name: str
    title: str
    parts: list[Part]


def build_sections(results: EvaluationResults, images: Mapping[str, bytes]) -> list[Section]:
    """All tables and figures that there are results for."""
    rows = report_rows(results)
    ensembles = any(row.group.members > 1 for row in rows)
    before = metrics_in(results, "uncalibrated")
    other = results.task != "classification"
    title = "Before calibration (raw)" if other else "Before calibration (raw), temperature and AURC"
    uncalibrated = metric_table(results, "uncalibrated", title, before)
    members = metric_table(results, "members", "Members and their diversity", metrics_in(results, "members"))
    severity = metric_table(results, "severities", "Means by severity", metrics_in(results, "severity"))
    ood = metric_table(results, "ood-summary", "OOD metrics", metrics_in(results, "ood"))
    views, view_differences = view_tables(results)
    single = len(rows) == 1
    dots, differences = metric_dots(results, rows), tables.differences(results)
    disputed, shown = disputed_images(results, images, rows), any(each.image for each in results.disputed)
    sections: list[tuple[str, str, *tuple[Part | None, ...]]] = [
        ("comparison", "Metrics" if single else "Comparison", dots, tables.comparison(results), differences),
        ("corruption", "Corrupted images", figures.severity_boxes(rows), severity, corruption_table(rows)),
        ("size", "Ensemble size", figures.trained_sizes(rows), figures.sub_ensembles(rows)),
        ("members", "Members", figures.member_accuracies(rows), members if ensembles else None),
        ("views", "Which view members use", view_figure(rows), views, view_differences),
        ("maps", "Class activation maps", cam_figure(results, images, rows), figures.map_similarity(rows)),
        ("disagreement", f"Disputed {'images' if shown else 'examples'}", *disputed),
        ("calibration", "Calibration", figures.reliability_diagram(rows), uncalibrated),
        ("uncertainty", "Uncertainty", figures.risk_coverage_curve(rows), ood, ood_table(rows)),
        ("training", "Training", figures.training_curves(rows)),
    ]
    entries = [Section(name, title, [part for part in parts if part is not None]) for name, title, *parts in sections]
    return [section for section in entries if section.parts]


def render_page(results: EvaluationResults, sections: list[Section]) -> str:
    """The HTML of the page."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    html = environment.get_template("page.html").render(
        title=f"Evaluation on {results.data}",
        counts=_counts(results),
        verdict=verdict(results),
        tiles=tiles(results),
        findings=findings(results),
        sections=sections,
        rows=_rows(results),
        provenance=_facts(results.provenance),
        test_sets=_test_sets(results),
        notes=results.notes,
        glossary=_glossary(results),
        protocol=_protocol(results),
        symbol=lambda style: symbol(style, line=False),
        colour=lambda style: f"c{style % COLOURS}",
        significance_symbols=tables.SYMBOLS,
        style=Markup("".join((_HERE / name).read_text("utf-8") for name in ("figures.css", "style.css"))),
        script=Markup((_HERE / "script.js").read_text("utf-8")),
    )
    return html.lstrip()


def _counts(results: EvaluationResults) -> list[str]:
    kinds = [test_set.kind for test_set in results.test_sets]
    counts = {"run": len(results.runs), "method": len(results.groups), "test example": results.examples}
    counts |= {
        "label" if results.task == "multi-label" else "class": results.classes,
        "corrupted test set": kinds.count("corrupted"),
        "OOD set": kinds.count("ood"),
    }
    return [plural(count, one) for one, count in counts.items() if count]


def _protocol(results: EvaluationResults) -> _Facts:
    """How predictions are made and calibrated, for the task."""
    how = "The averaged prediction is scaled with one temperature"
    prediction, fitted = "The mean of the members’ probabilities.", "the temperature"
    if results.task == "regression":
        prediction, fitted = "The mixture of the members’ Gaussian distributions.", "the factor"
        how = "The variance of the prediction is multiplied by one factor"
    if results.dense:
        prediction += " Metrics of classification are over all labelled pixels."
    calibrated = (
        f"{how} by test-time cross-validation: {fitted} is fitted on one half of the test set and used on the other "
        "half, and vice versa. Metrics are means over 5 random splits. All metrics are calibrated unless they are "
        "labelled raw."
    )
    if results.task == "classification" and not results.dense:
        calibrated += (
            " If half of a clean test set is predicted without error, one temperature fitted on validation examples is "
            "used for all test sets instead, and a note says so."
        )
    facts = [("Prediction", prediction), ("Calibrated", calibrated)]
    if results.task == "classification":
        small = (
            "Calibrated ECE is computed on halves of the test set. ECE is biased upwards when there are few examples, "
            "so it can exceed the raw ECE on a small test set."
        )
        facts.append(("ECE of small test sets", small))
    if any(test_set.kind == "corrupted" for test_set in results.test_sets):
        text = "Means over all corrupted test sets (corruptions × severities), each calibrated separately."
        facts.append(("Corrupted metrics", text))
    return facts


def _glossary(results: EvaluationResults) -> _Facts:
    """Metrics and what they mean; those with the same meaning together."""
    titles: dict[str, list[str]] = {}
    for metric in metrics_in(results, "clean", "human", "uncalibrated", "members", "views"):
        titles.setdefault(metric.meaning, []).append(metric.title.removesuffix(", %"))
    return [(", ".join(names), meaning[:1].upper() + meaning[1:]) for meaning, names in titles.items() if meaning]


def _test_sets(results: EvaluationResults) -> _Facts:
    """Each test set with the examples used; the corrupted ones together."""
    used, every = results.examples, results.test_examples
    sizes = f"all {used:,} examples" if used == every else f"{used:,} of {every:,} examples"
    entries = [("clean", sizes)]
    if corrupted := [test_set for test_set in results.test_sets if test_set.kind == "corrupted"]:
        names = [test_set.name.rpartition("-") for test_set in corrupted]
        corruptions = ", ".join(dict.fromkeys(corruption.replace("_", " ") for corruption, _, _ in names))
        severities = ", ".join(sorted({severity for _, _, severity in names}, key=int))
        fewer = f"; {corrupted[0].examples:,} examples each" if corrupted[0].examples != used else ""
        entries.append(("corrupted", f"{corruptions}; severities {severities}{fewer}"))
    for test_set in results.test_sets:
        if test_set.kind == "view":
            entries.append((f"only {test_set.name}", "everything else is set to the mean of the training data"))
        elif test_set.kind == "ood":
            entries.append((f"OOD: {test_set.name}", plural(test_set.examples, "input")))
    return entries


def _rows(results: EvaluationResults) -> list[dict[str, Any]]:
    """Each row with its recipe as (name, value, whether rows differ), and the provenance of each start of its runs."""
    rows = report_rows(results)
    recipes = [_common_fields([_fields(run.recipe) for run in row.runs]) for row in rows]
    entries = []
    for row, fields in zip(rows, recipes, strict=True):
        recipe = [(name, value, any(r.get(name) != value for r in recipes)) for name, value in fields.items()]
        runs = [(f"{run.name}, seed {run.seed}", _run(run)) for run in row.runs]
        entries.append({"row": row, "recipe": recipe, "runs": runs})
    return entries


def _fields(recipe: dict[str, Any]) -> dict[str, str]:
    """Fields of a recipe by readable names: method, method rank, …; without the seed."""
    return {
        key.replace(".", " ").replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in flatten(recipe)
        if key not in ("", "seed")
    }


def _common_fields(recipes: list[dict[str, str]]) -> dict[str, str]:
    """The fields of a row; where its runs differ, as in the split seed, all values."""
    return {name: ", ".join(dict.fromkeys(each.get(name, "") for each in recipes)) for name in recipes[0]}


def _facts(provenance: dict[str, Any]) -> _Facts:
    """Date, command, commit, machine and versions."""
    machine, versions = provenance.get("machine") or {}, provenance.get("versions") or {}
    parts = [machine.get("processor"), f"{machine['cores']} cores" if machine.get("cores") else None]
    parts += [machine.get("gpu"), machine.get("system")]
    commit = str(provenance.get("commit") or "none (installed package)")
    compute = provenance.get("compute") or provenance.get("setup") or {}
    entries = [
        ("date", str(provenance.get("date", ""))),
        ("command", str(provenance.get("command", ""))),
        ("commit", commit.replace("+", ", with uncommitted changes")),
        ("machine", ", ".join(str(part) for part in parts if part)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("compute", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in compute.items())),
    ]
    return [(name, text) for name, text in entries if text]


def _run(run: RunResult) -> list[_Facts]:
    starts, entries = run.environment, []
    for k, start in enumerate(starts):
        resumed = [("start", f"{k + 1} of {len(starts)}, from step {start.get('from_step', 0)}")]
        entries.append([*(resumed if len(starts) > 1 else []), *_facts(start)])
    result: _Facts = [(name, f"{run.training[name]:,}") for name in ("parameters", "steps") if name in run.training]
    if (seconds := run.training.get("seconds")) is not None:
        long = f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
        result.append(("training time", f"{seconds:.1f} s" if seconds < 100 else long))
    return [*entries, result] if result else entries
