"""Line plots and box plots, figures of several panels, legends, and figures as files."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from featureflock.reports import svg
from featureflock.reports.rows import ReportRow
from featureflock.reports.svg import AxisScale, Panel, Plot, Point, tag

_HERE = Path(__file__).parent
WIDTH, HEIGHT = 360, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 30, 42
_LEGEND = 22
"""Line height of a legend."""
Legend = list[tuple[str, Markup]]
"""Titles and symbols."""


@dataclass(frozen=True)
class Figure:
    """Panels side by side or, on a phone, below each other."""

    name: str
    """For links and file names."""
    title: str
    caption: str
    panels: list[Panel]
    legend: Legend
    wide: bool = False
    """Each panel takes the width of the page, and scrolls sideways on a phone."""
    kind: str = "figure"


class Series(NamedTuple):
    """A line of (x, mean, standard deviation or None), and the single runs that it is the mean of."""

    row: ReportRow
    points: list[tuple[float, float, float | None]]
    single: Sequence[list[Point]] = ()


class Box(NamedTuple):
    """Five-number summary of a distribution."""

    low: float
    first: float
    median: float
    third: float
    high: float


def legend(rows: Iterable[ReportRow], line: bool = True) -> Legend:
    """Rows with their colours and markers."""
    return [(row.title, symbol(row.style, line)) for row in rows]


def symbol(style: int, line: bool = True) -> Markup:
    """A row's marker as a small image; the row's title stands beside it."""
    parts = [tag("line", class_="line", x1=1, x2=23, y1=7, y2=7)] if line else []
    content = svg.coloured(style, *parts, svg.marker(style, 12, 7, size=4.5))
    width, box = (24, "0 0 24 14") if line else (14, "5 0 14 14")
    return tag("svg", content, viewBox=box, width=width, height=14, aria_hidden="true", class_="symbol")


def line_panel(
    title: str,
    x_label: str,
    label: str,
    series: Sequence[Series],
    *,
    x_range: Point | None = None,
    floor: float = -math.inf,
    top: float = math.inf,
    factors: Point = (1, 1),
    markers: bool = True,
) -> Panel:
    """Lines over x, which are integers if there is no range. Tick labels are multiplied by `factors`."""
    values = [y for s in series for run in s.single for _, y in run]
    values += [m + sign * (sd or 0) for s in series for _, m, sd in s.points for sign in (-1, 1)]
    if x_range is None:
        xs = [x for s in series for x, _, _ in s.points]
        margin = 0.5 if min(xs) == max(xs) else 0
        x_range = min(xs) - margin, max(xs) + margin
        x_ticks = [float(k) for k in range(math.ceil(x_range[0]), math.floor(x_range[1]) + 1)]
        x_ticks = x_ticks[:: max(1, -(-len(x_ticks) // 10))]
    else:
        x_ticks = svg.ticks(*x_range, 6)
    y_range = svg.padded(values, floor, top)
    plot, y_ticks = plot_area(x_range, y_range), svg.scaled_ticks(*y_range, factors[1])
    parts = [heading(title), plot.frame(svg.labelled(x_ticks, factors[0]), y_ticks, x_label)]
    for s in series:
        inside = [plot.line(run, "thin") for run in s.single]
        band = [(x, max(m - sd, floor), min(m + sd, top)) for x, m, sd in s.points if sd is not None]
        inside += [plot.band(band)] if len(band) > 1 else []
        inside.append(plot.line((x, m) for x, m, _ in s.points))
        if markers or len(s.points) == 1:
            for x, m, sd in s.points:
                spread = f" ± {factors[1] * sd:.4g}" if sd is not None else ""
                text = f"{s.row.title}, {x_label} {factors[0] * x:g}: {factors[1] * m:.4g}{spread}"
                inside.append(plot.marker(s.row.style, x, m, text, size=3.6))
        parts.append(svg.coloured(s.row.style, *inside))
    return svg.panel(WIDTH, HEIGHT, label, *parts)


def box_panel(
    title: str,
    x_label: str,
    label: str,
    places: Sequence[str],
    boxes: Sequence[tuple[ReportRow, Sequence[Box | float]]],
    factor: float,
    top: float,
) -> Panel:
    """At each place a box for each row, or a marker for a single number."""
    count = len(boxes)
    width = max(WIDTH, _LEFT + _RIGHT + len(places) * (count * 13 + 16))
    values = [v for _, entries in boxes for entry in entries for v in (entry if isinstance(entry, Box) else [entry])]
    y_range = svg.padded(values, 0, top)
    plot = plot_area((-0.5, len(places) - 0.5), y_range, width)
    step = min(26.0, (plot.x(1) - plot.x(0) - 12) / count)
    parts = [heading(title), plot.frame(list(enumerate(places)), svg.scaled_ticks(*y_range, factor), x_label)]
    for j, (row, entries) in enumerate(boxes):
        inside = []
        for k, entry in enumerate(entries):
            x = plot.x(k) + (j - (count - 1) / 2) * step
            name = f"{row.title}, {places[k]}"
            if isinstance(entry, Box):
                inside.append(_box(plot.y, x, min(0.72 * step, 16), entry, name, factor))
            else:
                inside.append(svg.marker(row.style, x, plot.y(entry), f"{name}: {factor * entry:.4g}"))
        parts.append(svg.coloured(row.style, *inside))
    return svg.panel(width, HEIGHT, label, *parts)


def standalone(figure: Figure) -> str:
    """A figure as an SVG file with its own style, panels side by side and the legend below."""
    columns = min(3, len(figure.panels))
    across, down = (max(sizes) for sizes in zip(*((p.width, p.height) for p in figure.panels), strict=True))
    width, bottom = columns * across, -(-len(figure.panels) // columns) * down
    height = bottom + _LEGEND * len(figure.legend)
    parts = [tag("title", figure.title), tag("style", Markup((_HERE / "figures.css").read_text("utf-8")))]
    parts.append(tag("rect", width=width, height=height, style="fill: var(--paper)"))
    for k, panel in enumerate(figure.panels):
        place = {"x": (k % columns) * across, "y": k // columns * down, "width": panel.width, "height": panel.height}
        parts.append(tag("svg", panel.svg, **place))
    for k, (title, mark) in enumerate(figure.legend):
        parts.append(tag("svg", mark, x=10, y=bottom + _LEGEND * k, width=24, height=14))
        parts.append(tag("text", title, class_="heading", x=40, y=bottom + _LEGEND * k + 12))
    size: dict[str, str | float] = {"width": width, "height": height, "viewBox": f"0 0 {width:g} {height:g}"}
    root = tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", font_family="sans-serif", **size)
    return f"{root}\n"


def heading(title: str) -> Markup:
    return tag("text", title, class_="heading", x=4, y=14)


def plot_area(x_range: Point, y_range: Point, width: float = WIDTH) -> Plot:
    """Axes with the usual margins."""
    return Plot(AxisScale(*x_range, _LEFT, width - _RIGHT), AxisScale(*y_range, HEIGHT - _BOTTOM, _TOP))


def _box(y: AxisScale, x: float, width: float, box: Box, name: str, factor: float) -> Markup:
    low, first, median, third, high = (y(value) for value in box)
    parts = ("minimum", "lower quartile", "median", "upper quartile", "maximum")
    texts = (f"{part} {factor * value:.4g}" for part, value in zip(parts, box, strict=True))
    return tag(
        "g",
        tag("title", f"{name}: {', '.join(texts)}"),
        tag("line", class_="whisker", x1=x, x2=x, y1=low, y2=first),
        tag("line", class_="whisker", x1=x, x2=x, y1=third, y2=high),
        tag("rect", class_="box", x=x - width / 2, width=width, y=third, height=max(first - third, 0.5)),
        tag("line", class_="median", x1=x - width / 2, x2=x + width / 2, y1=median, y2=median),
    )
