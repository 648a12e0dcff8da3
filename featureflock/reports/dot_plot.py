"""All metrics vs the baseline as a dot plot: relative improvements with 95 % intervals, better to the right.

    improvement = ± (ours − baseline) / size

The size is the baseline's value; of a percentage that should be high, such as accuracy, its distance from 100 %; and of
the NLL of a density, which may be 0 or negative, 1 nat.
"""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from featureflock.evaluation.metrics.registry import Group, Metric
from featureflock.evaluation.results import EvaluationResults, GroupResult
from featureflock.reports import svg
from featureflock.reports.plots import WIDTH, Figure, heading, legend
from featureflock.reports.rows import ReportRow
from featureflock.reports.svg import AxisScale, Panel, Plot, Point, tag
from featureflock.reports.tables import Significance, in_words, metrics_in, shorten, significance

_PANELS: dict[str, tuple[Group, ...]] = {
    "Clean test set": ("clean", "human"),
    "Corrupted test sets": ("corrupted",),
    "Corrupted test sets by severity": ("severity",),
    "Before calibration": ("uncalibrated",),
    "Only one view": ("views",),
    "OOD detection": ("ood",),
    "Members": ("members",),
}
"""Panels and their groups of metrics."""
_SAME_AXIS = ("Clean test set", "Corrupted test sets")
_LEFT, _TOP, _BOTTOM, _STEP, _GAP = 128, 26, 42, 9, 9
"""Margins, distance between two methods, and between two metrics."""
_SMALLEST = 1e-9
"""Nothing is relative to a smaller size."""
_REACH = 2.5
"""The axis ends here, in multiples of the largest improvement or loss; longer intervals are cut."""


class Dot(NamedTuple):
    """The relative improvement of a method on a metric."""

    row: ReportRow
    mean: float
    low: float | None
    high: float | None
    significance: Significance

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{_percent(self.low)}, {_percent(self.high)}]"
        outcome = f", significantly {self.significance}" if self.significance else ""
        return f"{self.row.title} {_percent(self.mean, sign=True)} %{interval}{outcome}"


def improvements(results: EvaluationResults, rows: Sequence[ReportRow], metric: Metric) -> list[Dot]:
    """The relative improvement of each method that is compared on this metric."""
    groups, dots = {row.title: row.group for row in rows}, []
    for row in rows:
        baseline, difference = groups.get(row.group.baseline or ""), row.group.differences.get(metric.key)
        size = 0.0 if baseline is None else _size(results, metric, baseline)
        if difference is not None and size > _SMALLEST:
            factor = (1 if metric.better == "higher" else -1) / size
            ends = [factor * end for end in (difference.low, difference.high) if end is not None]
            low, high = sorted(ends) if ends else (None, None)
            dots.append(Dot(row, factor * difference.mean, low, high, significance(metric, difference)))
    return dots


def metric_dots(results: EvaluationResults, rows: Sequence[ReportRow]) -> Figure | None:
    """The dot plot, a panel for each group of metrics; None if no methods are compared."""
    panels: dict[str, list[tuple[Metric, list[Dot]]]] = {}
    for title, groups in _PANELS.items():
        for metric in metrics_in(results, *groups):
            if metric.better and (dots := improvements(results, rows, metric)):
                panels.setdefault(title, []).append((metric, dots))
    if not panels:
        return None
    compared = [row for row in rows if row.group.differences]
    baseline = in_words(dict.fromkeys(row.group.baseline or "" for row in compared))
    shown = {title: [dot for _, dots in metrics for dot in dots] for title, metrics in panels.items()}
    main = [dot for title in _SAME_AXIS for dot in shown.get(title, [])]
    drawn = [
        _panel(title, baseline, metrics, _range(main if title in _SAME_AXIS else shown[title]))
        for title, metrics in panels.items()
    ]
    same = " The first two panels have the same axis." if all(title in panels for title in _SAME_AXIS) else ""
    caption = (
        f"Improvement over {baseline}, relative to its value; for accuracies and other percentages that should be "
        "high, relative to the distance from 100 % (the error rate). Better is to the right for every metric. Lines "
        "are 95 % intervals over the shared seeds, cut at the ends of the axis; filled markers are significant, hollow "
        f"ones are not.{same}"
    )
    if results.task == "regression":
        caption += " The NLL is that of a density, which has no zero: 0.01 nats count as 1 %."
    return Figure("improvements", f"All metrics vs {baseline}", caption, drawn, legend(compared, line=False))


def _size(results: EvaluationResults, metric: Metric, baseline: GroupResult) -> float:
    """What an improvement is relative to; 0 if it is unknown."""
    if metric.key not in baseline.metrics:
        return 0.0
    if results.task == "regression" and metric.key in ("nll", "raw_nll"):
        return 1.0
    value = baseline.metrics[metric.key].mean
    return 1 - value if metric.percent and metric.better == "higher" else abs(value)


def _range(dots: Sequence[Dot]) -> Point:
    """Range of the axis: all means, and intervals up to a limit, with 0."""
    reach = _REACH * max(abs(dot.mean) for dot in dots) or 0.01
    ends = [end for dot in dots for end in (dot.mean, dot.low, dot.high) if end is not None]
    return svg.padded([0.0, *(max(-reach, min(reach, end)) for end in ends)])


def _panel(title: str, baseline: str, metrics: Sequence[tuple[Metric, list[Dot]]], x_range: Point) -> Panel:
    bands = [_STEP * len(dots) + _GAP for _, dots in metrics]
    height = _TOP + sum(bands) + _BOTTOM
    plot = Plot(AxisScale(*x_range, _LEFT, WIDTH - 10), AxisScale(0, 1, height - _BOTTOM, _TOP))
    parts = [heading(title)]
    parts.append(plot.frame(svg.scaled_ticks(*x_range), [], f"better than {shorten(baseline, 24)} by, %"))
    parts.append(tag("line", class_="axis", x1=plot.x(0), x2=plot.x(0), y1=_TOP, y2=height - _BOTTOM))
    top: float = _TOP
    for (metric, dots), band in zip(metrics, bands, strict=True):
        name = shorten(metric.title.removesuffix(", %"), 21)
        middle = top + band / 2
        parts.append(tag("line", class_="grid", x1=_LEFT, x2=WIDTH - 10, y1=top + band, y2=top + band))
        parts.append(tag("text", name, class_="tick", x=_LEFT - 6, y=middle + 3.5, text_anchor="end"))
        for k, dot in enumerate(dots):
            parts.append(_draw(plot, dot, middle + (k - (len(dots) - 1) / 2) * _STEP, name))
        top += band
    texts = (f"{metric.title.removesuffix(', %')}: {in_words(map(str, dots))}" for metric, dots in metrics)
    label = f"Improvement over {baseline} on {title[:1].lower()}{title[1:]}. {'; '.join(texts)}."
    return svg.panel(WIDTH, height, label, *parts)


def _draw(plot: Plot, dot: Dot, y: float, name: str) -> Markup:
    inside = []
    if dot.low is not None and dot.high is not None:
        low, high = max(dot.low, plot.x.low), min(dot.high, plot.x.high)
        inside.append(tag("line", class_="whisker", x1=plot.x(low), x2=plot.x(high), y1=y, y2=y))
    class_ = "mark" if dot.significance else "hollow"
    inside.append(svg.marker(dot.row.style, plot.x(dot.mean), y, f"{name}: {dot}", class_, 3.6))
    return svg.coloured(dot.row.style, *inside)


def _percent(value: float, sign: bool = False) -> str:
    text = f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return text.replace("-", "−")
