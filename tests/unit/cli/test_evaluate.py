"""featureflock evaluate and report on the command line."""

import json
import shutil
import sys
import webbrowser

import numpy as np
import pytest
from helpers.small_ensembles import train_small

from featureflock.cli import main as cli
from featureflock.data import Digits

FEW = ["--corruptions", "contrast", "--severities", "2", "5", "--ood", "noise", "--maps", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), epochs=1)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; returns what it printed and its error message."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["featureflock", *map(str, words)])
        error = ""
        try:
            cli.main()
        except SystemExit as end:
            error = str(end.code)
        return capsys.readouterr().out, error

    return call


def test_evaluate_prints_the_comparison_and_writes_it(command, runs, tmp_path):
    out, error = command("evaluate", *runs, *FEW)
    assert not error
    for words in ("Deep Ensembles", "feature-WGD", "cNLL", "Difference vs Deep Ensembles", " ±"):
        assert words in out
    assert "Corrupted test images are generated with seed 0." in out
    folder = tmp_path / "featureflock-evaluation"
    assert sorted(path.name for path in folder.iterdir()) == ["images", "results.json", "table.md", "table.tex"]
    results = json.loads((folder / "results.json").read_text())
    shown = f"{results['groups'][0]['metrics']['nll']['mean']:.4f}"
    assert shown in out
    assert shown in (folder / "table.md").read_text()
    assert shown in (folder / "table.tex").read_text()
    assert "… (" not in command("evaluate", *runs, *FEW)[0]  # nothing left to do


def test_report_writes_a_page_and_opens_it(command, runs, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    out, error = command("report", *runs, *FEW, "--out", "page")
    assert not error
    page = tmp_path / "page" / "report.html"
    assert "wrote page/report.html" in out
    assert not opened
    assert "feature-WGD" in page.read_text()
    assert (tmp_path / "page" / "results.json").is_file()
    command("report", *runs, *FEW, "--out", "page", "--open")
    assert opened == [page.absolute().as_uri()]


def test_without_a_browser_the_path_of_the_page_is_printed(command, runs, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    out, _ = command("report", runs[0], *FEW, "--open")
    assert "No browser was found; open featureflock-report/report.html yourself." in out


def test_a_report_is_written_again_without_runs_and_data(command, runs, tmp_path, monkeypatch):
    """The page is the same, byte for byte, from the folder or the file, beside results.json or elsewhere."""
    for run in runs:
        shutil.copytree(run, tmp_path / "runs" / run.name)
    command("report", *(tmp_path / "runs").iterdir(), *FEW)
    folder = tmp_path / "featureflock-report"
    page = (folder / "report.html").read_bytes()
    shutil.rmtree(tmp_path / "runs")
    for words in ([folder], [folder / "results.json"], [folder, "--out", "again"]):
        (folder / "report.html").unlink(missing_ok=True)
        out, error = command("report", *words)
        assert not error
        written = tmp_path / (words[-1] if "--out" in words else folder) / "report.html"
        assert written.read_bytes() == page
        assert "report.html, and beside it results.json" in out


def test_results_and_runs_are_not_mixed(command, runs, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    assert "either the folders of runs or one results.json" in command("report", "results.json", *runs)[1]
    assert "has been evaluated; to evaluate with other" in command("report", "results.json", "--examples", "9")[1]
    assert "results.json: This is schema version None, not 2" in command("report", "results.json")[1]


@pytest.mark.parametrize("name", ["evaluate", "report"])
def test_invalid_arguments_are_refused_before_any_work(command, runs, tmp_path, name):
    (tmp_path / "file").write_text("x")
    assert "file is a file; choose a folder" in command(name, *runs, "--out", "file")[1]
    assert "Give at least one run" in command(name)[1]
    assert "nothing does not exist" in command(name, "nothing")[1]
    assert "did you mean fog?" in command(name, *runs, "--corruptions", "fogg")[1]
    assert "severities must be from 1 to 5; got 6" in command(name, *runs, "--severities", "6")[1]
    assert "There is no folder nowhere" in command(name, *runs, "--corrupted", "nowhere")[1]
    assert "examples must be at most 597" in command(name, *runs, "--examples", "598")[1]


def test_human_labels(command, runs, tmp_path):
    labels = Digits().load().test.labels
    np.save(
        tmp_path / "human.npy", 1 + 40 * np.eye(10)[labels] + np.random.default_rng(0).integers(0, 5, (len(labels), 10))
    )
    out, error = command("evaluate", *runs, *FEW, "--human-labels", "human.npy")
    assert not error
    assert "Human CE" in out
    assert "Human ρ" in out
    assert r"Human $\rho$" in (tmp_path / "featureflock-evaluation" / "table.tex").read_text()
    out, error = command("report", *runs, *FEW, "--human-labels", "human.npy")
    assert not error
    page = (tmp_path / "featureflock-report" / "report.html").read_text()
    assert "Human CE" in page
    assert "raw Human CE" in page
    assert "Cross-entropy to the distribution of human labels" in page
    out, error = command("evaluate", *runs, *FEW, "--human-labels", "missing.npy")
    assert "missing.npy cannot be read (No such file or directory); give an .npy file." in error
