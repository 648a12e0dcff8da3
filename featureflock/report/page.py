"""One page with everything, in one file: nothing is fetched, and all text is escaped."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.report import figures, tables
from featureflock.report.cam_grid import map_grid
from featureflock.report.disagreement import disputes
from featureflock.report.findings import sentences, tiles
from featureflock.report.panels import sign
from featureflock.report.per_run_tables import corruption_table, detection_table
from featureflock.report.rows import ReportRow, shown_settings
from featureflock.report.run_provenance import facts, sources
from featureflock.report.svg import COLOURS
from featureflock.report.views import view_figure, view_tables

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    parts: list[Any] = field(default_factory=list)
    """Tables, figures and so on; what is None is left out, and a section without parts, too."""


def page(evaluation: Evaluation) -> str:
    """The HTML of the page."""
    results, settings = evaluation.results, shown_settings(evaluation)
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sections = [
        Section(s.name, s.title, [part for part in s.parts if part is not None])
        for s in _sections(evaluation, settings)
    ]
    html = environment.get_template("page.html").render(
        title=f"Evaluation on {results['data']}",
        facts=_facts(evaluation),
        tiles=tiles(results),
        sentences=sentences(results),
        sections=[section for section in sections if section.parts],
        sources=sources(settings),
        provenance=facts(results["provenance"]),
        test_sets=_test_sets(evaluation),
        notes=results.get("notes", []),
        sign=lambda style: sign(style, line=False),
        colour=lambda style: f"c{style % COLOURS}",
        symbols=tables.SYMBOLS,
        style=Markup("".join((_HERE / name).read_text("utf-8") for name in ("figures.css", "style.css"))),
        script=Markup((_HERE / "script.js").read_text("utf-8")),
    )
    return html.lstrip()


def _sections(evaluation: Evaluation, settings: list[ReportRow]) -> list[Section]:
    results = evaluation.results
    uncalibrated, members = tables.details(results)
    several = any(s.members > 1 for s in settings)
    return [
        Section(
            "comparison",
            "Comparison" if len(settings) > 1 else "Metrics",
            [tables.comparison(results), tables.differences(results)],
        ),
        Section(
            "corruption", "On corrupted pictures", [figures.corruption_boxes(settings), corruption_table(settings)]
        ),
        Section("size", "By ensemble size", [figures.by_trained_size(settings), figures.by_size(settings)]),
        Section("members", "Members", [figures.member_accuracies(settings), members if several else None]),
        Section("views", "Which view members use", [view_figure(settings), *view_tables(results)]),
        Section("looking", "Where members look", [map_grid(evaluation, settings), figures.map_similarity(settings)]),
        Section("disagreement", "Where members disagree", [disputes(evaluation, settings)]),
        Section("calibration", "Calibration", [figures.reliability(settings), uncalibrated]),
        Section("certainty", "When to trust it", [figures.risk_coverage(settings), detection_table(settings)]),
        Section("training", "Training", [figures.training_curves(settings)]),
    ]


def _facts(evaluation: Evaluation) -> list[str]:
    results = evaluation.results
    corrupted = sum(condition.is_corrupted for condition in evaluation.conditions)
    unfamiliar = sum(condition.is_unfamiliar for condition in evaluation.conditions)
    counts = [
        (len(results["runs"]), "run", "runs"),
        (len(results["settings"]), "setting", "settings"),
        (results["examples"], "test example", "test examples"),
        (results["classes"], "class", "classes"),
        (corrupted, "corrupted test set", "corrupted test sets"),
        (unfamiliar, "set of unfamiliar inputs", "sets of unfamiliar inputs"),
    ]
    return [f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count]


def _test_sets(evaluation: Evaluation) -> list[tuple[str, str]]:
    """In words, with how many examples of each are used."""
    found = []
    corrupted = [condition.name.rpartition("-") for condition in evaluation.conditions if condition.is_corrupted]
    kinds = list(dict.fromkeys(corruption.replace("_", " ") for corruption, _, _ in corrupted))
    severities = sorted({severity for _, _, severity in corrupted})
    count = len(evaluation.conditions[0].positions)
    whole = len(evaluation.splits.test)
    part = f"{count:,} of {whole:,} examples, as many of each class as there are to be had"
    found.append(("clean", f"all {count:,} examples" if count == whole else part))
    if corrupted:
        used = len(next(condition for condition in evaluation.conditions if condition.is_corrupted).positions)
        some = f"; {used:,} examples of each" if used != count else ""
        found.append(("corrupted", f"{', '.join(kinds)}; severities {', '.join(severities)}{some}"))
    for condition in evaluation.conditions[1:]:
        if condition.view is not None:
            found.append((condition.name.replace("-", " ", 1), "the same with all else blank: the mean of training"))
        if condition.is_unfamiliar:
            found.append((condition.name.replace("-", " ", 1), f"{len(condition.positions):,} inputs"))
    return found
