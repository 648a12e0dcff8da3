"""What figures are made of: panels that stand beside each other or, on a phone, below each other."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from featureflock.report import svg
from featureflock.report.rows import ReportRow
from featureflock.report.svg import Plot, Span, tag

_HERE = Path(__file__).parent
WIDTH, HEIGHT = 360, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 30, 42
_LEGEND = 22
"""Height of a line of a legend."""


class Key(NamedTuple):
    """An entry of a legend."""

    title: str
    sign: Markup


@dataclass(frozen=True)
class Figure:
    name: str
    """For links to it."""
    title: str
    caption: str
    panels: list[Markup]
    legend: list[Key]
    natural: int = WIDTH
    """How wide a panel is, in pixels."""
    wide: bool = False
    """Whether panels are as wide as the page, and may be moved sideways on a phone."""
    kind: str = "figure"


class Series(NamedTuple):
    """A line with what it may stray by, (x, mean, deviation or None); and the lines that it is the mean of."""

    setting: ReportRow
    points: list[tuple[float, float, float | None]]
    single: Sequence[list[svg.Point]] = ()


class Box(NamedTuple):
    """Five numbers of a distribution."""

    low: float
    first: float
    median: float
    third: float
    high: float


def legend(settings: Iterable[ReportRow], line: bool = True) -> list[Key]:
    """The settings with their colours and marks."""
    return [Key(s.title, sign(s.style, line)) for s in settings]


def sign(style: int, line: bool = True) -> Markup:
    """A small picture of a setting's mark, which is said beside it in words."""
    parts = [tag("line", class_="line", x1=1, x2=23, y1=7, y2=7)] if line else []
    content = svg.coloured(style, *parts, svg.mark(style, 12, 7, size=4.5))
    wide, left = (24, 0) if line else (14, 5)
    return tag("svg", content, viewBox=f"{left} 0 {wide} 14", width=wide, height=14, aria_hidden="true", class_="sign")


def lines_panel(
    title: str,
    x_label: str,
    label: str,
    series: Sequence[Series],
    *,
    x_range: tuple[float, float] | None = None,
    floor: float = -math.inf,
    top: float = math.inf,
    factors: tuple[float, float] = (1, 1),
    whole: bool = False,
    marks: bool = True,
) -> Markup:
    """Lines over x. `factors` are for the texts of the ticks, such as 100 for percent; `whole`: x ticks are whole."""
    lows = [m - (sd or 0) for s in series for _, m, sd in s.points] + [
        y for s in series for run in s.single for _, y in run
    ]
    highs = [m + (sd or 0) for s in series for _, m, sd in s.points] + [
        y for s in series for run in s.single for _, y in run
    ]
    xs = [x for s in series for x, _, _ in s.points]
    x_low, x_high = x_range or (min(xs), max(xs))
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    plot = plot_of(x_low, x_high, *svg.padded([*lows, *highs], floor=floor, top=top))
    steps = svg.ticks(x_low, x_high, 6)
    if whole:
        steps = [float(k) for k in range(math.ceil(x_low), math.floor(x_high) + 1)]
        steps = steps[:: max(1, -(-len(steps) // 10))]
    parts = [heading(title)]
    parts.append(plot.frame(svg.labelled(steps, factors[0]), _y_ticks(plot, factors[1]), x_label))
    for s in series:
        inside = [plot.line(run, "thin") for run in s.single]
        spread = [(x, max(m - sd, floor), min(m + sd, top)) for x, m, sd in s.points if sd is not None]
        inside += [plot.band(spread)] if len(spread) > 1 else []
        inside.append(plot.line([(x, m) for x, m, _ in s.points], "line"))
        if marks or len(s.points) == 1:
            for x, m, sd in s.points:
                stray = f" ± {factors[1] * sd:.4g}" if sd is not None else ""
                text = f"{s.setting.title}, {x_label} {factors[0] * x:g}: {factors[1] * m:.4g}{stray}"
                inside.append(plot.mark(s.setting.style, x, m, text, size=3.6))
        parts.append(svg.coloured(s.setting.style, *inside))
    return svg.picture(WIDTH, HEIGHT, label, *parts)


def boxes_panel(
    title: str,
    x_label: str,
    label: str,
    places: Sequence[str],
    boxes: Sequence[tuple[ReportRow, Sequence[Box | float]]],
    factor: float = 1,
    top: float = math.inf,
) -> Markup:
    """At each place a box for each setting, or a mark where there is only one number."""
    count = len(boxes)
    wide = max(WIDTH, _LEFT + _RIGHT + len(places) * (count * 13 + 16))
    values = [v for _, row in boxes for each in row for v in (each if isinstance(each, Box) else [each])]
    plot = plot_of(-0.5, len(places) - 0.5, *svg.padded(values, floor=0, top=top), wide=wide)
    slot = (plot.x(1) - plot.x(0)) if len(places) > 1 else plot.x.end - plot.x.start
    step = min(26.0, (slot - 12) / count)
    ticks = [(float(k), place) for k, place in enumerate(places)]
    parts = [heading(title), plot.frame(ticks, _y_ticks(plot, factor), x_label)]
    for j, (setting, row) in enumerate(boxes):
        inside = []
        for k, each in enumerate(row):
            x = plot.x(k) + (j - (count - 1) / 2) * step
            where = f"{setting.title}, {places[k]}"
            if isinstance(each, Box):
                inside.append(_box(plot.y, x, min(0.72 * step, 16), each, where, factor))
            else:
                inside.append(svg.mark(setting.style, x, plot.y(each), f"{where}: {factor * each:.4g}", size=4))
        parts.append(svg.coloured(setting.style, *inside))
    return svg.picture(wide, HEIGHT, label, *parts)


def box_of(values: Sequence[float]) -> Box:
    """Least, quartiles and greatest; the quartiles are interpolated as NumPy does."""
    if len(values) == 1:
        return Box(*[values[0]] * 5)
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return Box(min(values), first, median, third, max(values))


def alone(figure: Figure, across: int = 3, high: float = HEIGHT) -> str:
    """A figure as an SVG file that needs no page, its panels side by side, as right in light as in dark."""
    columns = min(across, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    wide, below = columns * figure.natural, rows * high
    tall = below + _LEGEND * len(figure.legend)
    parts = [tag("title", figure.title), tag("style", Markup((_HERE / "figures.css").read_text("utf-8")))]
    parts.append(tag("rect", width=wide, height=tall, style="fill: var(--paper)"))
    for k, panel in enumerate(figure.panels):
        place = {"x": (k % columns) * figure.natural, "y": k // columns * high}
        parts.append(tag("svg", panel, width=figure.natural, height=high, **place))
    for k, key in enumerate(figure.legend):
        parts.append(tag("svg", key.sign, x=10, y=below + _LEGEND * k, width=24, height=14))
        parts.append(tag("text", key.title, class_="heading", x=40, y=below + _LEGEND * k + 12))
    view, space = f"0 0 {wide:g} {tall:g}", "http://www.w3.org/2000/svg"
    whole = tag("svg", *parts, xmlns=space, role="img", font_family="sans-serif", width=wide, height=tall, viewBox=view)
    return f"{whole}\n"


def heading(title: str) -> Markup:
    return tag("text", title, class_="heading", x=4, y=14)


def plot_of(
    x_low: float, x_high: float, y_low: float, y_high: float, wide: float = WIDTH, high: float = HEIGHT
) -> Plot:
    return Plot(Span(x_low, x_high, _LEFT, wide - _RIGHT), Span(y_low, y_high, high - _BOTTOM, _TOP))


def _y_ticks(plot: Plot, factor: float) -> list[tuple[float, str]]:
    return svg.labelled([t / factor for t in svg.ticks(factor * plot.y.low, factor * plot.y.high)], factor)


def _box(y: Span, x: float, wide: float, box: Box, where: str, factor: float) -> Markup:
    low, first, median, third, high = (y(value) for value in box)
    texts = (f"{name} {factor * value:.4g}" for name, value in zip(_NAMES, box, strict=True))
    return tag(
        "g",
        tag("title", f"{where}: {', '.join(texts)}"),
        tag("line", class_="whisker", x1=x, x2=x, y1=low, y2=first),
        tag("line", class_="whisker", x1=x, x2=x, y1=third, y2=high),
        tag("rect", class_="box", x=x - wide / 2, width=wide, y=third, height=max(first - third, 0.5)),
        tag("line", class_="median", x1=x - wide / 2, x2=x + wide / 2, y1=median, y2=median),
    )


_NAMES = ("least", "lower quartile", "median", "upper quartile", "greatest")
