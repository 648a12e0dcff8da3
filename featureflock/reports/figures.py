"""The figures of the report. Each takes the rows and returns None where there is nothing to show."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from featureflock.evaluation.metrics.registry import METRICS
from featureflock.evaluation.results import ReliabilityCurve, RunResult, ScoreDict
from featureflock.evaluation.statistics import SeedMean, mean
from featureflock.methods import DeepEnsembles
from featureflock.reports import svg
from featureflock.reports.plots import WIDTH, Box, Figure, Series, box_panel, heading, legend, line_panel
from featureflock.reports.rows import ReportRow, corrupted_sets
from featureflock.reports.svg import AxisScale, Panel, Plot, tag
from featureflock.reports.tables import shorten

Rows = Sequence[ReportRow]
_BySize = dict[int, list[ScoreDict]]
"""Scores of each run by number of members."""
_SCORES = ("accuracy", "nll")
"""Metrics of the figures with one panel each."""


def severity_boxes(rows: Rows) -> Figure | None:
    """Accuracy and NLL over the corruptions, by severity: a figure of the paper."""
    sets = corrupted_sets(rows)
    severities = sorted({severity for tested in sets.values() for severity in tested}, key=int)
    if not severities:
        return None
    panels = []
    for key in _SCORES:
        title, factor, top = _axis(key)
        boxes: list[tuple[ReportRow, list[Box | float]]] = []
        medians = []
        for row in rows:
            by_severity = [_box(row, [c for c in sets if s in sets[c]], s, key) for s in severities]
            boxes.append((row, [mean([run.clean.calibrated[key] for run in row.runs]).mean, *by_severity]))
            texts = (f"{factor * b.median:.4g} at severity {s}" for s, b in zip(severities, by_severity, strict=True))
            medians.append(f"{row.title}: {', '.join(texts)}")
        label = f"Box plots of {title} over {len(sets)} corruptions by severity. Medians of {'; '.join(medians)}."
        panels.append(box_panel(title, "severity", label, ["clean", *severities], boxes, factor, top))
    caption = (
        f"Each box shows the distribution over {len(sets)} corruptions of the test set at one severity: median, "
        "quartiles, and whiskers from minimum to maximum. Values are means over seeds, after temperature scaling. "
        "Markers on the left show the clean test set."
    )
    wide = len(rows) * (1 + len(severities)) > 20
    return Figure("severity", "Accuracy and NLL by severity", caption, panels, legend(rows, line=False), wide)


def sub_ensembles(rows: Rows) -> Figure | None:
    """Accuracy and NLL of ensembles of some of the members."""
    if all(row.group.members == 1 for row in rows):
        return None
    caption = (
        "Ensembles of some of the members: mean over up to 5 subsets of consecutive members, then over seeds; the band "
        "is ± one standard deviation over seeds. After calibration."
    )
    panels = _size_panels([(row, _sub_ensembles(row)) for row in rows], "number of members")
    return Figure("sub-ensembles", f"{_size_title(rows)} of smaller ensembles", caption, panels, legend(rows))


def trained_sizes(rows: Rows) -> Figure | None:
    """Accuracy and NLL of ensembles that were trained in several sizes: a figure of the paper."""
    methods: dict[str, dict[int, ReportRow]] = {}
    for row in rows:
        methods.setdefault(row.group.method, {}).setdefault(row.group.members, row)
    sizes = {size for by_size in methods.values() if len(by_size) > 1 for size in by_size}
    if sum(map(len, methods.values())) < len(rows) or not sizes:  # rows differ in something else
        return None
    lines = []
    for method, by_size in methods.items():
        points = {size: [run.clean.calibrated for run in row.runs] for size, row in by_size.items()}
        if method == DeepEnsembles.title:  # smaller ensembles are subsets of the largest
            subsets = _sub_ensembles(by_size[max(by_size)])
            points = {size: scores for size, scores in subsets.items() if size in sizes} | points
        lines.append((replace(next(iter(by_size.values())), title=method), points))
    caption = (
        "Each point is an ensemble trained with that number of members: mean over seeds, the band is ± one standard "
        "deviation. Members of Deep Ensembles are independent, so their smaller ensembles are subsets of the largest. "
        "After calibration."
    )
    panels = _size_panels(lines, "number of members trained together")
    title = f"{_size_title([row for row, _ in lines])} by ensemble size"
    return Figure("sizes", title, caption, panels, legend(row for row, _ in lines))


def reliability_diagram(rows: Rows) -> Figure | None:
    """Accuracy by confidence, before and after temperature scaling; None for tasks without classes."""
    if not rows[0].runs[0].details.reliability:
        return None
    caption = (
        "Examples in 15 bins by top probability: accuracy against mean confidence. Stems show the gap to the diagonal "
        "of perfect calibration. Filled markers: after scaling with a single temperature fitted on the whole test set. "
        "Hollow, dashed: raw. Bars: number of examples per bin, calibrated. Seeds are pooled; the ECE is that of the "
        "tables, mean over seeds."
    )
    return Figure("reliability", "Reliability diagrams", caption, [_reliability_panel(row) for row in rows], [])


def risk_coverage_curve(rows: Rows) -> Figure | None:
    """Error rate among the most confident predictions; None for tasks without classes."""
    if not rows[0].runs[0].details.risk_coverage:
        return None
    series = []
    for row in rows:
        curves = [run.details.risk_coverage for run in row.runs]
        coverage = curves[0]["coverage"]
        risks = np.array([np.interp(coverage, curve["coverage"], curve["risk"]) for curve in curves])
        series.append(_series(row, {x: mean(column.tolist()) for x, column in zip(coverage, risks.T, strict=True)}))
    texts = []
    for s in series:
        half = np.interp(0.5, [x for x, _, _ in s.points], [y for _, y, _ in s.points])
        rates = f"{100 * half:.1f} % on the most confident half, {100 * s.points[-1][1]:.1f} % on all"
        texts.append(f"{s.row.title} {rates}")
    label = f"Risk-coverage curves, error rates: {'; '.join(texts)}."
    title, x_label = "Error rate of the predictions made, %", "coverage, % of examples, most confident first"
    style: dict[str, Any] = {"x_range": (0, 1), "floor": 0, "factors": (100, 100), "markers": False}
    panel = line_panel(title, x_label, label, series, **style)
    caption = (
        "If the ensemble predicts only where its top probability is largest: the error rate of these predictions, by "
        "the fraction of examples that it predicts. Before calibration; mean over seeds, the band is ± one standard "
        "deviation."
    )
    return Figure("risk-coverage", "Selective prediction", caption, [panel], legend(rows))


def member_accuracies(rows: Rows) -> Figure | None:
    """Accuracy of each member and of the ensemble."""
    if all(row.group.members == 1 for row in rows) or not rows[0].runs[0].details.member_accuracy:
        return None
    runs = [run for row in rows for run in row.runs]
    limits = svg.padded([a for run in runs for a in (*run.details.member_accuracy, _accuracy(run))], floor=0, top=1)
    caption = (
        "Accuracy on the clean test set of each member (circles) and of the ensemble (large diamond), for each seed. "
        "All panels have the same axis."
    )
    panels = [_members_panel(row, *limits) for row in rows]
    return Figure("member-accuracies", "Members and their ensemble", caption, panels, [])


def training_curves(rows: Rows) -> Figure | None:
    """Metrics by epoch."""
    wanted: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "Training cross-entropy, nats": lambda line: line.get("cross_entropy"),
        "Training NLL of the members, nats": lambda line: line.get("member_nll"),
        "Training accuracy, %": lambda line: line.get("accuracy"),
        "Training RMSE": lambda line: line.get("rmse"),
        "Validation NLL, nats": lambda line: (line.get("validation") or {}).get("nll"),
        "Validation accuracy, %": lambda line: (line.get("validation") or {}).get("accuracy"),
        "Validation RMSE": lambda line: (line.get("validation") or {}).get("rmse"),
    }
    panels, with_single = [], sum(len(row.runs) for row in rows) <= 24  # more lines would hide the means
    for title, value in wanted.items():
        series = [curve for row in rows if (curve := _curve(row, value, with_single)) is not None]
        if series:
            label = f"{title} by epoch: {'; '.join(f'{s.row.title} {s.points[-1][1]:.4g} at the end' for s in series)}."
            few = max(len(s.points) for s in series) <= 20
            panels.append(line_panel(title, "epoch", label, series, markers=few))
    if not panels:
        return None
    caption = (
        "By epoch, mean over seeds; thin lines are single runs. Training: mean over members and the augmented batches "
        "of the epoch. Validation: the ensemble on held-out training examples, not calibrated."
    )
    return Figure("training", "Training curves", caption, panels, legend(rows))


def map_similarity(rows: Rows) -> Figure | None:
    """Similarity of the members' class activation maps."""
    kinds = {"clean": "map_similarity", "corrupted": "corrupted_map_similarity"}
    bars = [
        (row, kind, similarity)
        for row in rows
        for kind, key in kinds.items()
        if (similarity := row.group.metrics.get(key)) is not None
    ]
    if not bars:
        return None
    height = 28 * len(bars) + 80
    plot = Plot(AxisScale(0, 1, 12, WIDTH - 42), AxisScale(0, 1, height - 42, 24))
    parts = [heading("Cosine similarity of members’ maps")]
    parts.append(plot.frame(svg.labelled(svg.ticks(0, 1)), [], "0: disjoint, 1: identical"))
    for k, (row, kind, similarity) in enumerate(bars):
        y, end = 30 + 28 * k, plot.x(max(0.0, similarity.mean))
        bar = tag("rect", class_="bar" if kind == "clean" else "bar pale", x=12, width=end - 12, y=y + 11, height=9)
        whisker = []
        if similarity.sd is not None:
            ends = {"x1": plot.x(similarity.mean - similarity.sd), "x2": plot.x(similarity.mean + similarity.sd)}
            whisker = [tag("line", class_="spread", y1=y + 15.5, y2=y + 15.5, **ends)]
        parts.append(tag("text", f"{shorten(row.title, 40)}, {kind}", class_="tick", x=12, y=y + 8))
        parts.append(svg.coloured(row.style, bar, *whisker))
        parts.append(tag("text", f"{similarity.mean:.3f}", class_="tick", x=WIDTH - 4, y=y + 19, text_anchor="end"))
    values = "; ".join(f"{row.title}, {kind}: {similarity.mean:.3f}" for row, kind, similarity in bars)
    caption = (
        "Cosine similarity of two members’ class activation maps of the same image (Grad-CAM, for the class that the "
        "ensemble predicts): mean over pairs of members and images, then over seeds; whiskers are ± one standard "
        "deviation."
    )
    panel = svg.panel(WIDTH, height, f"Similarity of class activation maps: {values}.", *parts)
    return Figure("map-similarity", "Similarity of class activation maps", caption, [panel], [])


def _axis(key: str) -> tuple[str, float, float]:
    """Title, factor of the tick labels, and largest value of a metric; the smallest is 0."""
    metric = METRICS[key]
    title = f"{metric.title} ({metric.better} is better)"
    return (title, 100, 1.0) if metric.percent else (title, 1, math.inf)


def _size_panels(lines: Sequence[tuple[ReportRow, _BySize]], x_text: str) -> list[Panel]:
    panels = []
    for key in _size_scores(lines[0][0]):
        title, factor, top = _axis(key)
        series, texts = [], []
        for row, by_size in lines:
            series.append(_series(row, {n: mean([scores[key] for scores in runs]) for n, runs in by_size.items()}))
            (n, first, _), (m, last, _) = series[-1].points[0], series[-1].points[-1]
            text = f", {factor * last:.4g} with {m:g}" if m != n else ""
            texts.append(f"{row.title} {factor * first:.4g} with {n:g}{text}")
        label = f"{title} by {x_text}: {'; '.join(texts)}."
        floor = -math.inf if key == "nll" and "rmse" in lines[0][0].runs[0].clean.raw else 0  # a density has no bound
        panels.append(line_panel(title, "members", label, series, floor=floor, top=top, factors=(1, factor)))
    return panels


def _size_scores(row: ReportRow) -> list[str]:
    """The main score of the task, and the NLL."""
    return [key for key in ("accuracy", "label_accuracy", "rmse", "nll") if key in row.runs[0].clean.raw]


def _size_title(rows: Rows) -> str:
    return " and ".join(METRICS[key].title.removesuffix(", %") for key in _size_scores(rows[0]))


def _series(row: ReportRow, points: dict[Any, SeedMean]) -> Series:
    return Series(row, [(x, m.mean, m.sd) for x, m in sorted(points.items())])


def _curve(row: ReportRow, value: Callable[[dict[str, Any]], float | None], with_single: bool) -> Series | None:
    runs = [
        [(float(line["epoch"]), y) for line in run.curves if (y := value(line)) is not None and math.isfinite(y)]
        for run in row.runs
    ]
    epochs = sorted({x for run in runs for x, _ in run})
    if not epochs:
        return None
    by_epoch = {x: mean([y for run in runs for at, y in run if at == x]) for x in epochs}
    single = [run for run in runs if run] if with_single and len(runs) > 1 else []
    return Series(row, [(x, m.mean, None) for x, m in by_epoch.items()], single)


def _reliability_panel(row: ReportRow) -> Panel:
    width, height, base = 300, 330, 244
    plot = Plot(AxisScale(0, 1, 38, width - 12), AxisScale(0, 1, base, 54))
    counts = Plot(plot.x, AxisScale(0, 1, height - 40, base + 8))
    ticks = svg.labelled([0, 0.25, 0.5, 0.75, 1], 100)
    calibrated, raw = (_pooled([run.details.reliability[kind] for run in row.runs]) for kind in ("calibrated", "raw"))
    fullest = max(b.examples for b in calibrated)
    drawn = []
    for b in calibrated:
        left, top = plot.x(b.low), counts.y(b.examples / fullest)
        place = {"x": left + 0.7, "width": plot.x(b.high) - left - 1.4, "y": top, "height": counts.y.start - top}
        drawn.append(tag("rect", tag("title", f"{b.examples:g} examples"), class_="bar", **place))
        drawn.append(plot.line([(b.confidence, b.confidence), (b.confidence, b.accuracy)], "stem"))
    drawn.append(plot.line([(b.confidence, b.accuracy) for b in raw], "line dashed pale"))
    drawn += [plot.marker(row.style, b.confidence, b.accuracy, f"raw: {b}", "hollow", 3) for b in raw]
    drawn.append(plot.line([(b.confidence, b.accuracy) for b in calibrated]))
    drawn += [plot.marker(row.style, b.confidence, b.accuracy, str(b)) for b in calibrated]
    ece = [row.group.metrics.get(key) for key in ("raw_ece", "ece")]
    values = " → ".join(f"{m.mean:.4f}" for m in ece if m is not None)
    parts = [plot.frame([], ticks, ""), plot.line([(0, 0), (1, 1)], "ideal"), svg.coloured(row.style, *drawn)]
    parts.append(counts.frame(ticks, [], "top probability, %"))
    parts.append(tag("text", "correct, %", class_="tick", x=4, y=40))
    parts.append(heading(shorten(row.title, 40)))
    parts.append(tag("text", f"ECE, raw → calibrated: {values}", class_="tick", x=width - 12, y=40, text_anchor="end"))
    return svg.panel(width, height, f"Reliability diagram of {row.title}: ECE raw → calibrated {values}.", *parts)


class _Bin(NamedTuple):
    low: float
    high: float
    examples: float
    confidence: float
    accuracy: float

    def __str__(self) -> str:
        confidence, accuracy = 100 * self.confidence, 100 * self.accuracy
        return f"{confidence:.1f} % confident, {accuracy:.1f} % correct, {self.examples:g} examples"


def _pooled(curves: Sequence[ReliabilityCurve]) -> list[_Bin]:
    """Non-empty bins of all runs together."""
    edges, bins = curves[0].edges, []
    for k in range(len(edges) - 1):
        parts = [(c.count[k], c.confidence[k] or 0.0, c.accuracy[k] or 0.0) for c in curves if c.count[k]]
        count = sum(n for n, _, _ in parts)
        if count:
            confidence, accuracy = (sum(part[0] * part[i] for part in parts) / count for i in (1, 2))
            bins.append(_Bin(edges[k], edges[k + 1], count, confidence, accuracy))
    return bins


def _members_panel(row: ReportRow, low: float, high: float) -> Panel:
    line, left = 22, 58
    height = 30 + line * len(row.runs) + 42
    plot = Plot(AxisScale(low, high, left, WIDTH - 12), AxisScale(0, len(row.runs), height - 42, 30))
    parts = [heading(shorten(row.title, 52)), plot.frame(svg.scaled_ticks(low, high, about=6), [], "accuracy, %")]
    texts = []
    for k, run in enumerate(row.runs):
        y, members, ensemble = 30 + line * (k + 0.5), run.details.member_accuracy, _accuracy(run)
        parts.append(tag("line", class_="grid", x1=left, x2=WIDTH - 12, y1=y, y2=y))
        parts.append(tag("text", f"seed {run.seed}", class_="tick", x=left - 6, y=y + 3.5, text_anchor="end"))
        dots = [
            svg.marker(0, plot.x(a), y, f"member {i + 1}: {100 * a:.2f} %", "hollow dot") for i, a in enumerate(members)
        ]
        diamond = svg.marker(3, plot.x(ensemble), y, f"ensemble: {100 * ensemble:.2f} %", size=6)
        parts.append(svg.coloured(row.style, *(dots if len(members) > 1 else []), diamond))
        spread = f", members {100 * min(members):.2f} to {100 * max(members):.2f} %" if len(members) > 1 else ""
        texts.append(f"seed {run.seed} {100 * ensemble:.2f} %{spread}")
    return svg.panel(WIDTH, height, f"Accuracy of {row.title}: {'; '.join(texts)}.", *parts)


def _accuracy(run: RunResult) -> float:
    return run.clean.calibrated["accuracy"]


def _box(row: ReportRow, corruptions: Iterable[str], severity: str, key: str) -> Box:
    """Distribution over the corruptions of the means over seeds."""
    means = [mean([run.corrupted[c][severity].calibrated[key] for run in row.runs]).mean for c in corruptions]
    return Box(*np.percentile(means, (0, 25, 50, 75, 100)).tolist())


def _sub_ensembles(row: ReportRow) -> _BySize:
    runs = [run.details.by_size for run in row.runs]
    return {int(size): [run[size] for run in runs] for size in runs[0] if all(size in run for run in runs)}
