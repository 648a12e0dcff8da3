"""The figures of the page, each from what was measured; None where that is missing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from featureflock.evaluation.statistics import mean
from featureflock.methods import DeepEnsembles
from featureflock.report import svg
from featureflock.report.panels import (
    WIDTH,
    Box,
    Figure,
    Series,
    box_of,
    boxes_panel,
    heading,
    legend,
    lines_panel,
)
from featureflock.report.rows import ReportRow, corrupted_sets
from featureflock.report.svg import Plot, Span, tag
from featureflock.report.tables import cut

_METRICS = (
    ("accuracy", "Accuracy, % (higher is better)", 100, 1.0),
    ("nll", "NLL, nats (lower is better)", 1, math.inf),
)
"""With what to multiply them, and the most they can be; the least is 0."""
_LINES = 24
"""So many single runs are drawn behind their mean at most."""


def corruption_boxes(settings: list[ReportRow]) -> Figure | None:
    """Accuracy and NLL over the corruptions, by severity: the paper's figure."""
    sets = dict(corrupted_sets(settings))
    severities = sorted({v for held in sets.values() for v in held})
    if not severities:
        return None
    panels = []
    for key, title, factor, top in _METRICS:
        rows: list[tuple[ReportRow, list[Box | float]]] = []
        for s in settings:
            row: list[Box | float] = [s.over_seeds("clean", "calibrated", key).mean]
            for severity in severities:
                chosen = [c for c, held in sets.items() if severity in held]
                row.append(box_of([_corrupted(s, c, severity, key) for c in chosen]))
            rows.append((s, row))
        words = "; ".join(f"{s.title}: {_boxes_in_words(row, severities, factor)}" for s, row in rows)
        label = f"Box plots of {title} over {len(sets)} corruptions by severity. Median of {words}."
        panels.append(boxes_panel(title, "severity", label, ["clean", *severities], rows, factor, top))
    caption = (
        f"Each box is the distribution over {len(sets)} corruptions of the test set at one severity: quartiles, "
        "median, and whiskers to the least and the greatest. For each corruption the value is the mean over seeds, "
        "calibrated by temperature. The marks on the left are for the clean test set."
    )
    wide = len(settings) * (1 + len(severities)) > 20
    return Figure("boxes", "Accuracy and NLL by severity", caption, panels, legend(settings, line=False), wide=wide)


def by_size(settings: list[ReportRow]) -> Figure | None:
    """Accuracy and NLL of smaller ensembles."""
    if all(s.members == 1 for s in settings):
        return None
    panels = []
    for key, title, factor, top in _METRICS:
        series = []
        for s in settings:
            found = {int(n): s.over_seeds("clean", "by_size", n, key) for n in _sizes(s)}
            series.append(Series(s, [(n, m.mean, m.sd) for n, m in sorted(found.items())]))
        words = "; ".join(f"{s.setting.title} {_ends(s, factor)}" for s in series)
        label = f"{title} by the number of members: {words}."
        panels.append(lines_panel(title, "members", label, series, floor=0, top=top, factors=(1, factor), whole=True))
    caption = (
        "Ensembles of some of the members: the mean over up to 5 choices of neighbours in a circle, then over seeds, "
        "with a band of ± one standard deviation over seeds. Calibrated by temperature."
    )
    return Figure("sizes", "Accuracy and NLL of smaller ensembles", caption, panels, legend(settings))


def by_trained_size(settings: list[ReportRow]) -> Figure | None:
    """Accuracy and NLL of ensembles that were trained in several sizes: the paper's figure."""
    methods: dict[str, dict[int, ReportRow]] = {}
    for s in settings:
        methods.setdefault(s.runs[0].method, {}).setdefault(s.members, s)
    sizes = {size for found in methods.values() if len(found) > 1 for size in found}
    if sum(map(len, methods.values())) < len(settings) or not sizes:  # they differ in something else
        return None
    titled = {method: replace(next(iter(found.values())), title=method) for method, found in methods.items()}
    panels = []
    for key, title, factor, top in _METRICS:
        series = []
        for method, found in methods.items():
            points = {size: s.over_seeds("clean", "calibrated", key) for size, s in found.items()}
            if method == DeepEnsembles.title:  # smaller ones are parts of the largest
                largest = found[max(found)]
                parts = sizes & set(map(int, _sizes(largest))) - points.keys()
                points |= {size: largest.over_seeds("clean", "by_size", str(size), key) for size in parts}
            series.append(Series(titled[method], [(n, m.mean, m.sd) for n, m in sorted(points.items())]))
        words = "; ".join(f"{s.setting.title} {_ends(s, factor)}" for s in series)
        label = f"{title} by the number of members trained together: {words}."
        panels.append(lines_panel(title, "members", label, series, floor=0, top=top, factors=(1, factor), whole=True))
    caption = (
        "Each point is an ensemble trained with so many members, mean over seeds with a band of ± one standard "
        "deviation. Members of Deep Ensembles do not know of each other: their smaller ensembles are parts of the "
        "largest. Calibrated by temperature."
    )
    return Figure("trained-sizes", "Accuracy and NLL by ensemble size", caption, panels, legend(list(titled.values())))


def reliability(settings: list[ReportRow]) -> Figure:
    """How often predictions of each confidence are right, before and after calibration."""
    panels = [_reliability_panel(s) for s in settings]
    caption = (
        "Examples in 15 bins by their top probability: how many of them are right against how sure the ensemble is. "
        "Stems are the gap to the diagonal, where both are the same. Filled: calibrated by the one temperature that "
        "suits the whole test set. Hollow and dashed: raw. Bars: how many examples each calibrated bin has. Seeds are "
        "pooled. ECE is that of the tables, mean over seeds."
    )
    return Figure("reliability", "Reliability", caption, panels, [], natural=300)


def risk_coverage(settings: list[ReportRow]) -> Figure:
    """Errors among the most confident."""
    series = []
    for s in settings:
        curves = [e["clean"]["risk_coverage"] for e in s.measured]
        coverage = curves[0]["coverage"]
        risks = np.array([np.interp(coverage, c["coverage"], c["risk"]) for c in curves])
        found = [mean(list(column)) for column in risks.T]
        series.append(Series(s, [(x, m.mean, m.sd) for x, m in zip(coverage, found, strict=True)]))
    words = "; ".join(
        f"{s.setting.title} {100 * _at(s, 0.5):.1f} % wrong of the surest half and {100 * s.points[-1][1]:.1f} % of all"
        for s in series
    )
    panel = lines_panel(
        "Wrong among those answered, %",
        "answered, % of examples, the surest first",
        f"Risk-coverage curves: {words}.",
        series,
        x_range=(0, 1),
        floor=0,
        factors=(100, 100),
        marks=False,
    )
    caption = (
        "If the ensemble answers only where its top probability is largest: the error rate among its answers, by the "
        "share it answers. Before calibration; mean over seeds, with a band of ± one standard deviation."
    )
    return Figure("risk", "Answering only when sure", caption, [panel], legend(settings))


def member_accuracies(settings: list[ReportRow]) -> Figure | None:
    """Each member on its own, and what the ensemble makes of them."""
    if all(s.members == 1 for s in settings):
        return None
    every = [a for s in settings for e in s.measured for a in (*e["clean"]["member_accuracy"], _accuracy(e))]
    low, high = svg.padded(every, floor=0, top=1)
    panels = [_members_panel(s, low, high) for s in settings]
    caption = (
        "Accuracy on the clean test set of each member on its own (circles) and of the ensemble (the large mark), for "
        "each seed. The axes are the same in all panels."
    )
    return Figure("member-accuracies", "Members and their ensemble", caption, panels, [])


def training_curves(settings: list[ReportRow]) -> Figure | None:
    """What was measured while training."""
    wanted: list[tuple[str, float, Callable[[dict[str, Any]], float | None]]] = [
        ("Training cross-entropy, nats", 1, lambda line: line.get("cross_entropy")),
        ("Training accuracy, %", 1, lambda line: line.get("accuracy")),
        ("Validation NLL, nats", 1, lambda line: (line.get("validation") or {}).get("nll")),
        ("Validation accuracy, %", 1, lambda line: (line.get("validation") or {}).get("accuracy")),
    ]
    panels, several = [], sum(len(s.runs) for s in settings) <= _LINES
    for title, factor, get in wanted:
        series = [found for s in settings if (found := _curve(s, get, several)) is not None]
        if series:
            words = "; ".join(f"{s.setting.title} {s.points[-1][1]:.4g} at the end" for s in series)
            few = max(len(s.points) for s in series) <= 20
            panel = lines_panel(
                title, "epoch", f"{title} by epoch: {words}.", series, factors=(1, factor), whole=True, marks=few
            )
            panels.append(panel)
    if not panels:
        return None
    caption = (
        "By epoch, mean over seeds; thin lines are single runs. Training: the mean over members and augmented batches "
        "of the epoch. Validation: the ensemble on the examples held out of training, not calibrated."
    )
    return Figure("curves", "By epoch", caption, panels, legend(settings))


def map_similarity(settings: list[ReportRow]) -> Figure | None:
    """How alike the members' class activation maps are."""
    keys = [("map_similarity", "clean"), ("corrupted_map_similarity", "corrupted")]
    known = [(key, name) for key, name in keys if any(s.metric(key) for s in settings)]
    if not known:
        return None
    rows = [(s, name, found) for s in settings for key, name in known if (found := s.metric(key))]
    high = 28 * len(rows) + 80
    plot = Plot(Span(0, 1, 12, WIDTH - 42), Span(0, 1, high - 42, 24))
    parts = [heading("Cosine similarity of members’ maps")]
    parts.append(plot.frame(svg.labelled(svg.ticks(0, 1)), [], "0: nothing in common, 1: the same"))
    for k, (s, name, found) in enumerate(rows):
        y, end = 30 + 28 * k, plot.x(max(0.0, found.mean))
        bar = tag("rect", class_="bar" if name == "clean" else "bar pale", x=12, width=end - 12, y=y + 11, height=9)
        spread = []
        if found.sd is not None:
            ends = {"x1": plot.x(found.mean - found.sd), "x2": plot.x(found.mean + found.sd)}
            spread = [tag("line", class_="spread", y1=y + 15.5, y2=y + 15.5, **ends)]
        parts.append(tag("text", f"{cut(s.title, 40)}, {name}", class_="tick", x=12, y=y + 8))
        parts.append(svg.coloured(s.style, bar, *spread))
        parts.append(tag("text", f"{found.mean:.3f}", class_="tick", x=WIDTH - 4, y=y + 19, text_anchor="end"))
    words = "; ".join(f"{s.title}, {n}: {m.mean:.3f}{f' ± {m.sd:.3f}' if m.sd is not None else ''}" for s, n, m in rows)
    label = f"Bars of the similarity of class activation maps: {words}."
    caption = (
        "The cosine of two members’ class activation maps of one picture (Grad-CAM, for the class that the ensemble "
        "predicts), mean over pairs of members and pictures; mean over seeds, whiskers ± one standard deviation."
    )
    return Figure("similarity", "How alike members look", caption, [svg.picture(WIDTH, high, label, *parts)], [])


def _curve(s: ReportRow, get: Callable[[dict[str, Any]], float | None], several: bool) -> Series | None:
    runs = [
        [(float(line["epoch"]), value) for line in run.curves if (value := get(line)) is not None] for run in s.runs
    ]
    runs = [[(x, y) for x, y in run if math.isfinite(y)] for run in runs]
    epochs = sorted({x for run in runs for x, _ in run})
    if not epochs:
        return None
    by_epoch = [[y for run in runs for at, y in run if at == x] for x in epochs]
    points: list[tuple[float, float, float | None]] = [
        (x, mean(values).mean, None) for x, values in zip(epochs, by_epoch, strict=True)
    ]
    return Series(s, points, [run for run in runs if run] if several and len(runs) > 1 else [])


def _reliability_panel(s: ReportRow) -> Markup:
    wide, high, base = 300, 330, 244
    plot = Plot(Span(0, 1, 38, wide - 12), Span(0, 1, base, 54))
    below = Span(0, 1, high - 40, base + 8)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    calibrated, raw = (_pooled([e["clean"]["reliability"][kind] for e in s.measured]) for kind in ("calibrated", "raw"))
    parts = [plot.frame([], svg.labelled(ticks, 100), ""), plot.line([(0, 0), (1, 1)], "ideal")]
    fullest = max(count for _, _, count, _ in calibrated)
    bars, stems = [], []
    for confidence, right, count, (low, up) in calibrated:
        x, top = plot.x(low), below(count / fullest)
        box = {"x": x + 0.7, "width": plot.x(up) - x - 1.4, "y": top, "height": below.start - top}
        bars.append(tag("rect", tag("title", f"{count:g} examples"), class_="bar", **box))
        stems.append(plot.line([(confidence, confidence), (confidence, right)], "stem"))
    marks = [
        plot.mark(s.style, c, a, f"{100 * c:.1f} % sure, {100 * a:.1f} % right, {n:g} examples")
        for c, a, n, _ in calibrated
    ]
    hollow = [plot.line([(c, a) for c, a, _, _ in raw], "line dashed pale")]
    hollow += [
        plot.mark(s.style, c, a, f"raw: {100 * c:.1f} % sure, {100 * a:.1f} % right", "hollow", 3) for c, a, _, _ in raw
    ]
    parts.append(
        svg.coloured(s.style, *bars, *stems, *hollow, plot.line([(c, a) for c, a, _, _ in calibrated]), *marks)
    )
    bottom = Plot(plot.x, Span(0, 1, below.start, below.end))
    parts.append(bottom.frame(svg.labelled(ticks, 100), [], "top probability, %"))
    parts.append(tag("text", "right, %", class_="tick", x=4, y=40))
    ece = [s.metric(key) for key in ("raw_ece", "ece")]
    numbers = " → ".join(f"{m.mean:.4f}" for m in ece if m is not None)
    parts.append(heading(cut(s.title, 44)))
    parts.append(tag("text", f"ECE, raw → calibrated: {numbers}", class_="tick", x=wide - 12, y=40, text_anchor="end"))
    return svg.picture(wide, high, f"Reliability diagram of {s.title}: ECE raw → calibrated {numbers}.", *parts)


def _pooled(many: Sequence[dict[str, list[Any]]]) -> list[tuple[float, float, float, tuple[float, float]]]:
    """Confidence, accuracy and count of all runs together, with the edges, for bins that have examples."""
    edges, found = many[0]["edges"], []
    for k in range(len(edges) - 1):
        held = [(r["count"][k], r["confidence"][k], r["accuracy"][k]) for r in many if r["count"][k]]
        count = sum(n for n, _, _ in held)
        if count:
            confidence, right = (sum(part[0] * part[i] for part in held) / count for i in (1, 2))
            found.append((confidence, right, count, (edges[k], edges[k + 1])))
    return found


def _members_panel(s: ReportRow, low: float, high: float) -> Markup:
    row, left = 22, 58
    tall = 30 + row * len(s.measured) + 42
    plot = Plot(Span(low, high, left, WIDTH - 12), Span(0, len(s.measured), tall - 42, 30))
    ticks = svg.labelled([t / 100 for t in svg.ticks(100 * low, 100 * high, 6)], 100)
    parts = [heading(cut(s.title, 52)), plot.frame(ticks, [], "accuracy, %")]
    words = []
    for k, e in enumerate(s.measured):
        y, members, whole = 30 + row * (k + 0.5), e["clean"]["member_accuracy"], _accuracy(e)
        parts.append(tag("line", class_="grid", x1=left, x2=WIDTH - 12, y1=y, y2=y))
        parts.append(tag("text", f"seed {e['seed']}", class_="tick", x=left - 6, y=y + 3.5, text_anchor="end"))
        dots = [
            svg.mark(0, plot.x(a), y, f"member {i + 1}: {100 * a:.2f} %", "hollow dot", 4)
            for i, a in enumerate(members)
        ]
        ensemble = svg.mark(3, plot.x(whole), y, f"ensemble: {100 * whole:.2f} %", "mark", 6)
        parts.append(svg.coloured(s.style, *(dots if len(members) > 1 else []), ensemble))
        several = f", members {100 * min(members):.2f} to {100 * max(members):.2f} %" if len(members) > 1 else ""
        words.append(f"seed {e['seed']} {100 * whole:.2f} %{several}")
    label = f"Accuracy of {s.title}: {'; '.join(words)}."
    return svg.picture(WIDTH, tall, label, *parts)


def _accuracy(entry: dict[str, Any]) -> float:
    return float(entry["clean"]["calibrated"]["accuracy"])


def _corrupted(s: ReportRow, corruption: str, severity: str, key: str) -> float:
    return s.over_seeds("corrupted", corruption, severity, "calibrated", key).mean


def _sizes(s: ReportRow) -> list[str]:
    """Those that all runs have."""
    return [n for n in s.measured[0]["clean"]["by_size"] if all(n in e["clean"]["by_size"] for e in s.measured)]


def _boxes_in_words(row: Sequence[Box | float], severities: Sequence[str], factor: float) -> str:
    boxes = [each for each in row if isinstance(each, Box)]
    pairs = zip(severities, boxes, strict=True)
    return ", ".join(f"{factor * box.median:.4g} at severity {severity}" for severity, box in pairs)


def _ends(s: Series, factor: float) -> str:
    (n, first, _), (m, last, _) = s.points[0], s.points[-1]
    return f"{factor * first:.4g} with {n:g}" + (f", {factor * last:.4g} with {m:g}" if m != n else "")


def _at(s: Series, x: float) -> float:
    return float(np.interp(x, [p[0] for p in s.points], [p[1] for p in s.points]))
