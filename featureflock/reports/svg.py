"""SVG elements for figures that follow the page's style sheet.

Colours are CSS classes: c0 … c7 set the colour of a row, used through `currentColor`. Axes and texts have classes too,
so that one figure suits light and dark mode.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

COLOURS = 8
Point = tuple[float, float]
Tick = tuple[float, str]


class Panel(NamedTuple):
    """One plot of a figure, an <svg> element of this size in pixels."""

    svg: Markup
    width: float
    height: float


def tag(name: str, *content: str, **attributes: str | float) -> Markup:
    """An element. Attribute names lose a trailing _, other _ become -; numbers are rounded to 0.1."""
    texts = {k: v if isinstance(v, str) else f"{v:.1f}".removesuffix(".0") for k, v in attributes.items()}
    pairs = (Markup(' {}="{}"').format(k.rstrip("_").replace("_", "-"), text) for k, text in texts.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup().join(pairs), join(content))


def join(parts: Iterable[str]) -> Markup:
    return Markup().join(escape(part) for part in parts)


class AxisScale(NamedTuple):
    """Linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Plot:
    x: AxisScale
    y: AxisScale

    def frame(self, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], x_label: str) -> Markup:
        """Horizontal grid lines, x axis, tick labels and axis label."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        parts = []
        for value, text in y_ticks:
            y = self.y(value)
            parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
            parts.append(tag("text", text, class_="tick", x=left - 6, y=y + 3.5, text_anchor="end"))
        parts.append(tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
        for value, text in x_ticks:
            x = self.x(value)
            parts.append(tag("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            parts.append(tag("text", text, class_="tick", x=x, y=bottom + 16, text_anchor="middle"))
        parts.append(tag("text", x_label, class_="label", x=(left + right) / 2, y=bottom + 32, text_anchor="middle"))
        return join(parts)

    def line(self, points: Iterable[Point], class_: str = "line") -> Markup:
        return tag("polyline", class_=class_, points=self._coordinates(points))

    def band(self, points: Sequence[tuple[float, float, float]]) -> Markup:
        """Area between two lines, given as (x, low, high)."""
        outline = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        return tag("polygon", class_="band", points=self._coordinates(outline))

    def marker(self, style: int, x: float, y: float, title: str = "", class_: str = "mark", size: float = 4) -> Markup:
        return marker(style, self.x(x), self.y(y), title, class_, size)

    def _coordinates(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def marker(style: int, x: float, y: float, title: str = "", class_: str = "mark", size: float = 4) -> Markup:
    """The shape of a row, so that rows differ in more than colour; the title is its tooltip."""
    tooltip = [tag("title", title)] if title else []
    if style % 6 == 0:
        return tag("circle", *tooltip, class_=class_, cx=x, cy=y, r=size)
    points = " ".join(f"{x + size * u:.1f},{y + size * v:.1f}" for u, v in _CORNERS[style % 6 - 1])
    return tag("polygon", *tooltip, class_=class_, points=points)


def coloured(style: int, *content: str) -> Markup:
    """A group in the colour of a row."""
    return tag("g", *content, class_=f"c{style % COLOURS}")


def panel(width: float, height: float, label: str, *content: str) -> Panel:
    """A panel; screen readers read the label."""
    box = f"0 0 {width:g} {height:g}"
    svg = tag("svg", *content, viewBox=box, role="img", aria_label=label, style=f"--natural: {width:g}px")
    return Panel(svg, width, height)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within the range."""
    rough = (high - low) / about
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def scaled_ticks(low: float, high: float, factor: float = 100, about: int = 5) -> list[Tick]:
    """Ticks whose labels are round numbers after multiplication by the factor, such as 100 for percentages."""
    return labelled([tick / factor for tick in ticks(factor * low, factor * high, about)], factor)


def labelled(values: Sequence[float], factor: float = 1) -> list[Tick]:
    """Ticks with as many digits as they need."""
    scaled = [factor * value for value in values]
    digits = next((d for d in range(5) if all(abs(round(v, d) - v) < 1e-9 for v in scaled)), 5)
    return [(value, f"{v:.{digits}f}".replace("-", "−")) for value, v in zip(values, scaled, strict=True)]


def padded(values: Sequence[float], floor: float = -math.inf, top: float = math.inf) -> Point:
    """The range of the values with a margin of 6 %, within [floor, top]."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    return max(low - margin, floor), min(high + margin, top)


_CORNERS: tuple[tuple[Point, ...], ...] = (
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    ((0, -1.2), (1.15, -0.35), (0.7, 1), (-0.7, 1), (-1.15, -0.35)),
)
