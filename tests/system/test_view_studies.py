"""Data with views, from training by command to a report, and the studies of views."""

import json
from xml.etree import ElementTree

import pytest
from helpers.small_published_sets import small_sets

from featureflock.cli.reproduce import main as reproduce
from featureflock.cli.train import main as train
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.reports import write_report


def test_from_training_to_a_report(tmp_path, monkeypatch, temp_cache):
    """A run on two-view digits: the summary holds the metrics, and the figure has one dot per member."""
    monkeypatch.chdir(tmp_path)
    flags = ["--members", "3", "--epochs", "2", "--subset", "200"]
    for method in ("deep-ensembles", "feature-wgd"):
        train(["two-view-digits", "--method", method, "--out", method, *flags])
    protocol = EvaluationProtocol(examples=100, corruptions=(), ood=(), maps=0)
    found = evaluate_runs(["deep-ensembles", "feature-wgd"], protocol)
    assert [s.name for s in found.results.test_sets] == ["clean", "left", "right"]
    views, summary = found.results.runs[0].views, found.results.runs[0].summary
    members = views.only["left"].member_accuracy
    assert summary["only_left_member_accuracy"] == pytest.approx(sum(members) / 3)
    assert summary["only_left_best_member_accuracy"] == max(members)
    assert summary["left_share"] == pytest.approx(sum(views.member_share) / 3)
    assert summary["view_difference_on_average"] <= summary["view_difference_by_input"]
    assert (tmp_path / "deep-ensembles" / "predictions" / "only-left.safetensors").is_file()
    page = write_report(found.results, found.images, tmp_path / "report").read_text()
    assert "Which view members use" in page
    assert "View difference" in page
    figure = ElementTree.parse(tmp_path / "report" / "figures" / "views.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(figure.findall(f".//{space}circle")) == 2 * 3
    labels = [each.get("aria-label") for each in figure.iter(f"{space}svg") if each.get("aria-label")]
    assert len(labels) == 2
    assert "with only the left" in labels[0]
    assert "prefers-color-scheme: dark" in figure.find(f"{space}style").text


def test_dominoes_are_evaluated_by_view(tmp_path, monkeypatch, temp_cache):
    small_sets(60, 60)
    monkeypatch.chdir(tmp_path)
    train(
        ["two-view-digits", "--data", "dominoes", "--members", "2", "--epochs", "1", "--subset", "40", "--out", "run"]
    )
    found = evaluate_runs(["run"], EvaluationProtocol(corruptions=(), ood=(), maps=0))
    assert [s.name for s in found.results.test_sets] == ["clean", "digit", "image"]
    assert "digit_share" in found.results.runs[0].summary


@pytest.mark.parametrize("study", ["two-views", "dominoes"])
def test_studies_of_views_run(study, tmp_path):
    reproduce([study, "--seeds", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "smoke" / f"{study}.json").read_text())["rows"]
    assert [row["title"] for row in rows][2] == "feature-MAP, shared head"
    assert "view_difference_on_average" in rows[0]["ours"]
    assert rows[0]["ours"]["view_difference_by_input"]["mean"] == 0  # a single network
    assert rows[3]["ours"]["view_difference_by_input"]["mean"] > 0
    assert "| View difference |" in (tmp_path / "smoke" / f"{study}.md").read_text()
