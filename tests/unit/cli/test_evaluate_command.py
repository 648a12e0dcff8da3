"""featureflock evaluate and report, as a user calls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import webbrowser

import pytest
from helpers.small_ensembles import train_small

from featureflock.cli import main as cli

FEW = ["--corruptions", "contrast", "--severities", "2", "5", "--ood", "noise", "--maps", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), epochs=1)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty folder; what it printed, and what it complained of."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["featureflock", *map(str, words)])
        complaint = ""
        try:
            cli.main()
        except SystemExit as end:
            complaint = str(end.code)
        return capsys.readouterr().out, complaint

    return call


def test_evaluate_prints_the_comparison_and_writes_it(command, runs, tmp_path):
    out, complaint = command("evaluate", *runs, *FEW)
    assert not complaint
    for words in ("Deep Ensembles", "feature-WGD", "cNLL", "Difference vs Deep Ensembles", "± "):
        assert words in out
    assert "Corruptions generated during the evaluation (seed 0): all." in out
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
    out, complaint = command("report", *runs, *FEW, "--out", "page")
    assert not complaint
    page = tmp_path / "page" / "report.html"
    assert "wrote page/report.html" in out
    assert not opened
    assert "feature-WGD" in page.read_text()
    assert (tmp_path / "page" / "results.json").is_file()
    command("report", *runs, *FEW, "--out", "page", "--open")
    assert opened == [page.absolute().as_uri()]


def test_without_a_browser_it_says_what_to_do(command, runs, monkeypatch):
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
        out, complaint = command("report", *words)
        assert not complaint
        written = tmp_path / (words[-1] if "--out" in words else folder) / "report.html"
        assert written.read_bytes() == page
        assert "report.html, and beside it results.json" in out


def test_results_and_runs_are_not_mixed(command, runs, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    assert "either the folders of runs or one results.json" in command("report", "results.json", *runs)[1]
    assert "has been evaluated; to evaluate with other" in command("report", "results.json", "--examples", "9")[1]
    assert "results.json: These results have schema version None" in command("report", "results.json")[1]


@pytest.mark.parametrize("name", ["evaluate", "report"])
def test_mistakes_are_told_before_any_work(command, runs, tmp_path, name):
    (tmp_path / "file").write_text("x")
    assert "--out file is a file; choose a folder" in command(name, *runs, "--out", "file")[1]
    assert "Say which runs" in command(name)[1]
    assert "nothing does not exist" in command(name, "nothing")[1]
    assert "did you mean fog?" in command(name, *runs, "--corruptions", "fogg")[1]
    assert "severities must be among 1 to 5; got 6" in command(name, *runs, "--severities", "6")[1]
    assert "There is no folder nowhere" in command(name, *runs, "--corrupted", "nowhere")[1]
    assert "examples must be at most 597" in command(name, *runs, "--examples", "598")[1]


def test_a_stopped_evaluation_keeps_what_is_done(runs, tmp_path):
    """Ctrl-C in a real process: one sentence, code 130, whole files only; and the same command goes on."""
    run = tmp_path / "run"
    shutil.copytree(runs[0], run, ignore=shutil.ignore_patterns("predictions"))
    words = [sys.executable, "-m", "featureflock", "evaluate", str(run), "--ood", "--maps", "0"]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 100
    while len(list(run.glob("predictions/*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=100)
    assert process.returncode == 130, complaint
    assert "tasks are cached, and the same command resumes from there." in complaint
    assert "Traceback" not in complaint
    names = [path.name for path in (run / "predictions").iterdir()]
    assert all(name.endswith(".safetensors") for name in names)
    assert 3 <= len(names) < 76
