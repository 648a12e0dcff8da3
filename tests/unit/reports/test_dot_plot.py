"""The dot plot of all metrics: relative improvements, better to the right."""

from dataclasses import replace

import pytest
from helpers.made_evaluations import make_results
from helpers.result_groups import BASELINE, compared, group, results_of

from featureflock.evaluation.metrics.registry import find_metric
from featureflock.reports.dot_plot import improvements, metric_dots
from featureflock.reports.rows import ReportRow, report_rows


def rows_of(results):
    return [ReportRow(g.title, k, g, []) for k, g in enumerate(results.groups)]


def dots(key, value, difference, task="classification", seeds=3):
    given = results_of(group(BASELINE, {key: value}), compared("A", {key: value}, {key: difference}, seeds=seeds))
    given = replace(given, task=task)
    return improvements(given, rows_of(given), find_metric(key))


@pytest.mark.parametrize(
    ("key", "value", "difference", "expected"),
    [
        ("nll", 0.5, (-0.05, -0.1, 0.01), (0.1, -0.02, 0.2)),
        ("accuracy", 0.8, (0.02, -0.01, 0.05), (0.1, -0.05, 0.25)),  # of the error rate, 0.2
        ("accuracy", 0.8, (-0.02, None, None), (-0.1, None, None)),
        ("human_entropy_correlation", 0.5, (0.1, 0.05, 0.15), (0.2, 0.1, 0.3)),
    ],
)
def test_improvements_are_relative_and_positive_if_better(key, value, difference, expected):
    (dot,) = dots(key, value, difference)
    assert (dot.mean, dot.low, dot.high) == tuple(end if end is None else pytest.approx(end) for end in expected)
    assert dot.significance == ("better" if expected[1] is not None and expected[1] > 0 else "")


def test_the_likelihood_of_a_density_is_in_nats():
    (dot,) = dots("nll", -0.001, (-0.05, -0.06, -0.04), "regression")
    assert (dot.mean, dot.low, dot.high) == pytest.approx((0.05, 0.04, 0.06))


def test_nothing_is_relative_to_zero():
    assert dots("accuracy", 1.0, (-0.1, -0.2, -0.05)) == []
    assert dots("nll", 0.0, (0.1, 0.05, 0.2)) == []


def test_all_metrics_with_a_direction_are_shown():
    results = make_results((BASELINE, "feature-WGD", "Single"), views=("left", "right"))
    figure = metric_dots(results, report_rows(results))
    text = " ".join(panel.svg for panel in figure.panels)
    for key in results.groups[1].differences:
        metric = find_metric(key)
        assert (f">{metric.title.removesuffix(', %')}<" in text) == bool(metric.better), key
    assert [title for title, _ in figure.legend] == ["feature-WGD", "Single"]
    assert figure.title == "All metrics vs Deep Ensembles"
    assert "NLL: feature-WGD " in text
    assert "better than Deep Ensembles by, %" in text


def test_intervals_are_cut_where_they_would_hide_the_means():
    given = results_of(group(BASELINE, {"nll": 0.5}), compared("A", {"nll": 0.5}, {"nll": (-0.01, -50.0, 50.0)}))
    (panel,) = metric_dots(given, rows_of(given)).panels
    assert "[−10000.0, 10000.0]" in panel.svg
    assert "1000<" not in panel.svg  # no tick that far


def test_without_a_comparison_there_is_no_plot():
    results = make_results(("feature-WGD", "Single"))
    assert metric_dots(results, report_rows(results)) is None
