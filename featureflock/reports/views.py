"""Which view of the input the members use: accuracy with only one view, as a figure and as tables."""

from collections.abc import Sequence

from featureflock.evaluation.metrics.registry import METRICS
from featureflock.evaluation.results import EvaluationResults, RunResult
from featureflock.reports import svg
from featureflock.reports.plots import HEIGHT, Figure, heading, plot_area
from featureflock.reports.rows import ReportRow
from featureflock.reports.svg import Panel, Point, tag
from featureflock.reports.tables import Table, differences, metric_table, metrics_in, shorten

_WIDTH = 300


def view_figure(rows: Sequence[ReportRow]) -> Figure | None:
    """A dot per member: its accuracy with only the first view against its accuracy with only the second."""
    first = rows[0].runs[0].views
    names = list(first.only) if first is not None else []
    if len(names) != 2:
        return None
    points = [point for row in rows for run in row.runs for point in _points(run)]
    x_range, y_range = (svg.padded(values, floor=0, top=1) for values in zip(*points, strict=True))
    panels = [_panel(row, names, x_range, y_range) for row in rows]
    caption = (
        f"Each circle is a member: its accuracy where everything but the {names[0]} is blank, against its accuracy "
        f"where everything but the {names[1]} is blank. The diamond is the ensemble. Members that specialise would lie "
        "at the lower right and the upper left. Dotted lines mark chance level, if it lies within the axes. All seeds "
        "are shown, and all panels have the same axes."
    )
    return Figure("views", "Accuracy of members with one view", caption, panels, [])


def view_tables(results: EvaluationResults) -> tuple[Table | None, Table | None]:
    """Metrics of views, and their differences vs Deep Ensembles; None if there are none."""
    metrics, title = metrics_in(results, "views"), "Accuracy with one view, and which view drives the members"
    if not metrics:
        return None, None
    metrics = [METRICS["accuracy"], *metrics]
    return metric_table(results, "views", title, metrics), differences(results, metrics, "view-differences")


def _panel(row: ReportRow, names: Sequence[str], x_range: Point, y_range: Point) -> Panel:
    plot = plot_area(x_range, y_range, _WIDTH)
    x_label, y_label = (f"correct with only the {name}, %" for name in names)
    parts = [heading(shorten(row.title, 38))]
    parts.append(tag("text", y_label, class_="tick", x=_WIDTH - 10, y=27, text_anchor="end"))
    parts.append(plot.frame(svg.scaled_ticks(*x_range), svg.scaled_ticks(*y_range), x_label))
    assert row.runs[0].views is not None
    chance = row.runs[0].views.chance
    if x_range[0] < chance < x_range[1]:
        parts.append(plot.line([(chance, y_range[0]), (chance, y_range[1])], "ideal"))
    if y_range[0] < chance < y_range[1]:
        parts.append(plot.line([(x_range[0], chance), (x_range[1], chance)], "ideal"))
    circles, diamonds = [], []
    for run in row.runs:
        *members, ensemble = _points(run)
        for i, (x, y) in enumerate(members if run.members > 1 else []):
            text = f"seed {run.seed}, member {i + 1}: {100 * x:.1f} % and {100 * y:.1f} % correct"
            circles.append(plot.marker(0, x, y, text, "hollow dot", 3.5))
        x, y = ensemble
        text = f"seed {run.seed}, ensemble: {100 * x:.1f} % and {100 * y:.1f} % correct"
        diamonds.append(plot.marker(3, x, y, text, size=6))
    parts.append(svg.coloured(row.style, *circles, *diamonds))
    by_view = zip(*(point for run in row.runs for point in _points(run)[:-1]), strict=True)
    ranges = (
        f"{100 * min(values):.1f} to {100 * max(values):.1f} % with only the {name}"
        for values, name in zip(by_view, names, strict=True)
    )
    return svg.panel(_WIDTH, HEIGHT, f"Members of {row.title}: {' and '.join(ranges)} correct.", *parts)


def _points(run: RunResult) -> list[Point]:
    """Accuracy with each view: of each member, then of the ensemble."""
    assert run.views is not None
    xs, ys = ([*scores.member_accuracy, scores.scores.raw["accuracy"]] for scores in run.views.only.values())
    return list(zip(xs, ys, strict=True))
