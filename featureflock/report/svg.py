"""Small pieces of SVG for figures that the page styles.

Colours are not said here: what is of class c0 … c7 has the colour of a setting, by `currentColor`, and axes and texts
have classes of their own, so that one picture is right in light and in dark.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

COLOURS = 8
Point = tuple[float, float]


def tag(name: str, *content: str, **attributes: str | float | None) -> Markup:
    """An element. Names lose a last _, and other _ become -; what is None is left out."""
    pairs = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _short(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup().join(pairs), together(content))


def together(parts: Iterable[str]) -> Markup:
    return Markup().join(escape(part) for part in parts)


class Span(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Plot:
    """Two axes, with their ticks inside the spans."""

    x: Span
    y: Span

    def frame(self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]], x_label: str) -> Markup:
        """Lines across for the y ticks, an axis below, and texts."""
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
        return together(parts)

    def line(self, points: Iterable[Point], class_: str = "line") -> Markup:
        return tag("polyline", class_=class_, points=" ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points))

    def band(self, points: Sequence[tuple[float, float, float]]) -> Markup:
        """Between two lines: (x, low, high)."""
        around = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in around)
        return tag("polygon", class_="band", points=corners)

    def mark(self, style: int, x: float, y: float, title: str = "", class_: str = "mark", size: float = 4) -> Markup:
        return mark(style, self.x(x), self.y(y), title, class_, size)


def mark(style: int, x: float, y: float, title: str = "", class_: str = "mark", size: float = 4) -> Markup:
    """A sign for a setting, so that colours are not all that tells them apart; the title shows under the mouse."""
    inside = [tag("title", title)] if title else []
    if style % 6 == 0:
        return tag("circle", *inside, class_=class_, cx=x, cy=y, r=size)
    corners = _CORNERS[style % 6 - 1]
    points = " ".join(f"{x + size * u:.1f},{y + size * v:.1f}" for u, v in corners)
    return tag("polygon", *inside, class_=class_, points=points)


def coloured(style: int, *content: str) -> Markup:
    return tag("g", *content, class_=f"c{style % COLOURS}")


def picture(width: float, height: float, label: str, *content: str) -> Markup:
    """The whole; the label is what is read aloud to those who do not see it."""
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", *content, viewBox=box, role="img", aria_label=label, style=f"--natural: {width:g}px")


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within the range."""
    step = nice_step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def labelled(values: Sequence[float], factor: float = 1) -> list[tuple[float, str]]:
    """Ticks with as many digits as they need."""
    scaled = [factor * value for value in values]
    digits = next((d for d in range(5) if all(abs(round(v, d) - v) < 1e-9 for v in scaled)), 5)
    return [(value, f"{v:.{digits}f}".replace("-", "−")) for value, v in zip(values, scaled, strict=True)]


def nice_step(rough: float) -> float:
    power: float = 10 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def padded(values: Iterable[float], share: float = 0.06, floor: float = -math.inf, top: float = math.inf) -> Point:
    """The range of values with some air."""
    known = list(values)
    low, high = min(known), max(known)
    air = share * (high - low) or 0.05 * abs(high) or 0.05
    return max(low - air, floor), min(high + air, top)


_CORNERS: tuple[tuple[Point, ...], ...] = (
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    ((0, -1.2), (1.15, -0.35), (0.7, 1), (-0.7, 1), (-1.15, -0.35)),
)


def _short(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
