"""Tables as data: columns from the metric registry, best values, significance."""

import pytest
from helpers.made_evaluations import make_images, make_results
from helpers.result_groups import BASELINE, THREE, compared, group, results_of

from featureflock.evaluation.metrics.registry import METRICS, Metric
from featureflock.evaluation.statistics import PairedDifference, SeedMean
from featureflock.reports.findings import findings
from featureflock.reports.page import build_sections
from featureflock.reports.tables import beside_paper, comparison, differences, metric_table, metrics_in


def test_best_values_are_marked_and_so_are_values_that_print_alike():
    table = comparison(THREE)
    assert [header.title for header in table.headers] == ["Method", "Members", "Seeds", "Accuracy, %", "NLL", "DEE"]
    assert [[(cell.text, cell.spread, cell.best) for cell in row[3:]] for row in table.rows] == [
        [("90.12", "0.20", True), ("0.3100", "0.0100", False), ("5.0", "", False)],
        [("90.12", "0.15", True), ("0.3000", "0.0200", True), ("> 5", "", True)],
        [("85.00", "0.10", False), ("0.3000", "0.0000", True), ("1.0", "", False)],
    ]


def test_one_seed_has_no_deviation_and_one_row_has_no_best_value():
    table = comparison(results_of(group("Single", {"accuracy": 0.5}, seeds=1)))
    assert table.rows[0][3].plain == "50.00"
    assert not any(cell.best for cell in table.rows[0])
    assert differences(results_of(group("Single", {"accuracy": 0.5}))) is None


def test_missing_values_are_dashes_and_never_best():
    table = comparison(results_of(group("A", {"accuracy": 0.5, "ece": 0.1}), group("B", {"accuracy": 0.4})))
    cells = [row[4] for row in table.rows]
    assert [(cell.text, cell.best, cell.value) for cell in cells] == [("0.1000", False, 0.1), ("–", False, None)]


def test_significant_differences_are_marked_by_which_direction_is_better():
    table = differences(THREE)
    assert table.title == "Difference vs Deep Ensembles"
    assert [[cell.plain for cell in row[1:]] for row in table.rows] == [
        ["0.00 [−1.00, 1.00]", "−0.0100 [−0.0200, −0.0001] ▲"],
        ["−5.12 [−6.00, −4.00] ▼", "−0.0100 [−0.0300, 0.0100]"],
    ]
    assert [cell.significance for row in table.rows for cell in row[1:]] == ["", "better", "worse", ""]
    assert "significant (95 % interval excludes 0)" in table.note


@pytest.mark.parametrize(
    ("interval", "seeds", "mark"),
    [((-2.0, -1.0), 3, "▲"), ((-2.0, -1.0), 2, ""), ((None, None), 3, ""), ((None, None), 1, "")],
    ids=["three seeds", "two seeds", "equal differences", "one seed"],
)
def test_intervals_that_cannot_be_trusted_have_no_mark(interval, seeds, mark):
    """Fewer than 3 seeds, or no interval because all differences are equal."""
    table = differences(
        results_of(group(BASELINE, {}), compared("A", {"nll": 1}, {"nll": (-1.5, *interval)}, seeds=seeds))
    )
    assert table.rows[0][1].plain.endswith(mark or ("]" if interval[0] else "−1.5000"))
    assert ("▲" in table.rows[0][1].plain) == bool(mark)


def test_shared_seeds_have_a_column_where_they_differ():
    few, more = ({"nll": (1.0, 0.5, 1.5)}, 3), ({"nll": (1.0, None, None)}, 1)
    table = differences(results_of(*(compared("A", {"nll": 1}, found, seeds=seeds) for found, seeds in (few, more))))
    assert [header.title for header in table.headers] == ["Method", "Shared seeds", "NLL"]
    assert [row[1].text for row in table.rows] == ["3", "1"]
    assert table.rows[1][2].plain == "+1.0000"


@pytest.fixture
def registered():
    """Register metrics for one test."""
    added = []

    def register(metric):
        METRICS.add(metric.key, metric)
        added.append(metric.key)

    yield register
    for key in added:
        METRICS.pop(key)


@pytest.mark.parametrize(
    ("metric_group", "section", "table"),
    [
        ("clean", "comparison", "comparison"),
        ("corrupted", "comparison", "comparison"),
        ("severity", "corruption", "severities"),
        ("uncalibrated", "calibration", "uncalibrated"),
        ("members", "members", "members"),
        ("views", "views", "views"),
        ("ood", "uncertainty", "ood-summary"),
    ],
)
def test_a_new_metric_appears_in_the_table_of_its_group(registered, metric_group, section, table):
    registered(Metric("top2", "Top-2, %", "higher", "percent:1", lambda run: 0.5, "top-2 accuracy", metric_group))
    results = make_results(views=("left", "right"))
    for result in results.groups:
        result.metrics["top2"] = result.metrics["accuracy"]
    parts = {
        part.name: part
        for s in build_sections(results, make_images(results))
        if s.name == section
        for part in s.parts
        if part.kind == "table"
    }
    (place,) = [k for k, header in enumerate(parts[table].headers) if header.title == "Top-2, %"]
    assert parts[table].headers[place].meaning == "top-2 accuracy"
    assert parts[table].rows[0][place].text == f"{100 * results.groups[0].metrics['accuracy'].mean:.1f}"
    assert any(row[place].best for row in parts[table].rows)


def test_metrics_that_are_not_registered_here_are_shown_by_their_key():
    table = comparison(results_of(group("A", {"accuracy": 0.5, "my_metric": 0.25})))
    assert [header.title for header in table.headers[3:]] == ["Accuracy, %", "my metric"]
    assert table.rows[0][4].text == "0.2500"


def test_a_group_without_metrics_has_no_table():
    results = results_of(group("A", {"accuracy": 0.5}))
    assert metric_table(results, "members", "Members", metrics_in(results, "members")) is None


def corrected(p_holm):
    difference = PairedDifference(-0.01, -0.02, -0.001, 5, 0.03, p_holm)
    row = group("A", {"nll": 0.3, "ece": 0.1}, baseline=BASELINE, differences={"nll": difference, "ece": difference})
    row.differences["ece"] = difference._replace(p_holm=None)
    return results_of(group(BASELINE, {"nll": 0.31, "ece": 0.11}), row)


@pytest.mark.parametrize(
    ("p_holm", "text", "mark"), [(0.24, "= 0.24", ""), (0.0312, "= 0.031", " ▲"), (2e-4, "< 0.001", " ▲")]
)
def test_endpoints_are_marked_by_the_corrected_p_value(p_holm, text, mark):
    table = differences(corrected(p_holm))
    assert table.rows[0][1].plain == f"−0.0100 [−0.0200, −0.0010], p {text}{mark}"
    assert table.rows[0][2].plain == "−0.0100 [−0.0200, −0.0010] ▲"  # not an endpoint: by its interval
    assert (
        "The endpoints (NLL) are marked by p < 0.05 after Holm’s correction for all endpoints of the row" in table.note
    )
    assert "Holm" not in differences(THREE).note


def test_findings_name_the_correction():
    sentences = " ".join(finding.text for finding in findings(corrected(0.24)))
    assert "significantly better on ECE (−0.0100); no significant difference on NLL" in sentences
    assert "after Holm’s correction" in sentences
    assert "Holm" not in " ".join(finding.text for finding in findings(THREE))


def test_the_table_of_a_study_marks_endpoints_by_the_corrected_p_value():
    value, difference = (
        SeedMean(0.3, 0.01, 5)._asdict(),
        PairedDifference(-0.01, -0.02, -0.001, 5, 0.03, 0.06)._asdict(),
    )
    rows = [
        {"title": "DE", "members": 5, "ours": {"nll": value}, "paper": {}},
        {
            "title": "A",
            "members": 5,
            "ours": {"nll": value},
            "paper": {},
            "against": "DE",
            "differences": {"nll": difference},
        },
    ]
    study = {"what": "A study", "scale": "paper", "rows": rows, "test_examples": 100, "corrupted_examples": None}
    table = beside_paper(study)
    assert table.rows[2][2].plain == "−0.0100 [−0.0200, −0.0010], p = 0.06"
    assert "after Holm’s correction" in table.note
    del difference["p"], difference["p_holm"]  # results of an earlier version
    assert beside_paper(study).rows[2][2].plain == "−0.0100 [−0.0200, −0.0010] ▲"
