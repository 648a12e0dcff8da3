"""Which view members use: each member by what it can do with one view only, and the same in tables."""

from typing import Any

from markupsafe import Markup

from featureflock.report import svg
from featureflock.report.panels import HEIGHT, Figure, heading, plot_of
from featureflock.report.rows import ReportRow
from featureflock.report.svg import Point, tag
from featureflock.report.tables import CLEAN, Column, Table, averages, cut, differences

_WIDTH = 300


def view_figure(settings: list[ReportRow]) -> Figure | None:
    """A dot for each member: its accuracy with only one view, and with only the other."""
    names = tuple(settings[0].measured[0].get("views", {}).get("only", ()))
    if len(names) != 2:
        return None
    every = [point for s in settings for e in s.measured for point in (*_members(e), _ensemble(e))]
    spans = [svg.padded(values, floor=0, top=1) for values in zip(*every, strict=True)]
    panels = [_panel(s, names, spans[0], spans[1]) for s in settings]
    caption = (
        f"Each circle is a member: its accuracy where all but the {names[0]} is blank, and where all but the "
        f"{names[1]} is. The large mark is the ensemble. Members that specialise would lie at the lower right and "
        "at the upper left. Dotted lines are chance, where they are within the axes, which are the same in all panels. "
        "All seeds are shown."
    )
    return Figure("views", "What members can do with one view", caption, panels, [], natural=_WIDTH)


def view_tables(results: dict[str, Any]) -> list[Table | None]:
    """What is left with one view, which view drives members, and how that differs from Deep Ensembles."""
    names = [name.removeprefix("only-") for name in results.get("conditions", ()) if name.startswith("only-")]
    if len(names) != 2:
        return []
    columns = (CLEAN[0], *_columns(*names))
    return [
        averages("views-table", "With one view only, and what drives members", results, columns),
        differences(results, columns, "view-differences"),
    ]


def _columns(first: str, second: str) -> tuple[Column, ...]:
    alone = [
        column
        for view in (first, second)
        for column in (
            Column(f"only_{view}_accuracy", f"only {view}, %", 1, "high", "accuracy of the ensemble", True),
            Column(f"only_{view}_best_member_accuracy", f"best member, only {view}, %", 1, "high", "the same", True),
        )
    ]
    return (
        *alone,
        Column("covered_views", "views covered", 1, "", "for how many some member can do without the other"),
        Column(f"{first}_share", f"{first}’s share", 3, "", f"how much of members' predictions the {first} drives"),
        Column("view_difference_by_input", "difference by input", 3, "", "of two members' shares, input by input"),
        Column("view_difference_on_average", "on average", 3, "", "of two members' mean shares"),
    )


def _panel(s: ReportRow, names: tuple[str, ...], x_span: Point, y_span: Point) -> Markup:
    plot = plot_of(*x_span, *y_span, wide=_WIDTH)
    x_ticks, y_ticks = (
        svg.labelled([t / 100 for t in svg.ticks(100 * low, 100 * high)], 100) for low, high in (x_span, y_span)
    )
    y_label = f"correct with only the {names[1]}, %"
    parts = [heading(cut(s.title, 38))]
    parts.append(tag("text", y_label, class_="tick", x=_WIDTH - 10, y=27, text_anchor="end"))
    parts.append(plot.frame(x_ticks, y_ticks, f"correct with only the {names[0]}, %"))
    chance = s.measured[0]["views"]["chance"]
    if x_span[0] < chance < x_span[1]:
        parts.append(plot.line([(chance, y_span[0]), (chance, y_span[1])], "ideal"))
    if y_span[0] < chance < y_span[1]:
        parts.append(plot.line([(x_span[0], chance), (x_span[1], chance)], "ideal"))
    dots, marks = [], []
    for e in s.measured:
        for i, (x, y) in enumerate(_members(e) if e["members"] > 1 else []):
            dots.append(plot.mark(0, x, y, f"seed {e['seed']}, member {i + 1}: {_in_words(x, y)}", "hollow dot", 3.5))
        x, y = _ensemble(e)
        marks.append(plot.mark(3, x, y, f"seed {e['seed']}, ensemble: {_in_words(x, y)}", "mark", 6))
    parts.append(svg.coloured(s.style, *dots, *marks))
    xs, ys = zip(*(point for e in s.measured for point in _members(e)), strict=True)
    ranges = (
        f"{100 * min(v):.1f} to {100 * max(v):.1f} % with only the {n}" for v, n in zip((xs, ys), names, strict=True)
    )
    return svg.picture(_WIDTH, HEIGHT, f"Members of {s.title}: {' and '.join(ranges)} correct.", *parts)


def _members(entry: dict[str, Any]) -> list[Point]:
    first, second = (part["member_accuracy"] for part in entry["views"]["only"].values())
    return list(zip(first, second, strict=True))


def _ensemble(entry: dict[str, Any]) -> Point:
    x, y = (part["raw"]["accuracy"] for part in entry["views"]["only"].values())
    return x, y


def _in_words(x: float, y: float) -> str:
    return f"{100 * x:.1f} % and {100 * y:.1f} % correct"
