"""What the README shows runs, what it says is in results/, and modules import only from those above them."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import featureflock as ff
from featureflock.demo_report import markdown, tables, verdict

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "featureflock"


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    loader = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)]
    names = {
        "loader": loader,
        "make_extractor": lambda: nn.Linear(64, 32),
        "make_head": lambda: nn.Linear(32, 10),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["probs"].shape == (16, 10)
    assert torch.equal(ff.load("my-ensemble").predict(loader[2][0]), names["probs"])
    names["loss"].backward()


def test_the_code_in_the_page_on_training_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), flags=re.S)
    x, y = torch.randn(64, 64), torch.arange(64) % 10
    names = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    exec(block, names)
    assert names["result"]["members"] == 5
    assert (tmp_path / "runs" / "mine" / "ensemble").is_dir()


def test_the_code_in_the_page_on_evaluation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), flags=re.S)
    torch.manual_seed(0)
    x, y = torch.randn(60, 64), torch.arange(60) % 10
    ens = ff.Ensemble([nn.Linear(64, 32) for _ in range(3)], nn.Linear(32, 10))
    names = {"ens": ens, "x_test": x, "y_test": y, "x_validation": x, "y_validation": y}
    exec(block, names)
    assert ens.temperature == names["temperature"] == ff.load("my-ensemble").temperature


def test_the_code_in_the_page_on_scaling_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), flags=re.S)
    torch.manual_seed(0)
    names = {
        "make_extractor": lambda: nn.Linear(64, 32),
        "make_head": lambda: nn.Linear(32, 10),
        "loader": [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)],
    }
    exec(block, names)
    x = names["loader"][0][0]
    assert torch.equal(ff.load("my-ensemble").predict(x), names["ens"].predict(x))


def test_the_code_in_the_page_on_methods_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), flags=re.S)
    torch.manual_seed(0)
    names = {
        "make_extractor": lambda: nn.Linear(64, 32),
        "x_train": torch.randn(90, 64),
        "y_train": torch.arange(90) % 10,
    }
    exec(block, names)
    assert int(names["ens"].layer.seen) == 90


def test_the_example_runs_and_learns():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_loop.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    accuracy = float(re.search(r"ensemble ([\d.]+) % correct", run.stdout)[1])
    assert accuracy > 93


def test_figures_in_the_readme_are_those_in_results():
    summary = json.loads((ROOT / "results" / "demo.json").read_text())
    shown = re.search(r"<!-- demo: from results/demo.json -->\n(.*?)\n<!-- end -->", README, flags=re.S)[1]
    assert shown.strip() == "\n\n".join(map(markdown, tables(summary)))
    assert len(verdict(summary).splitlines()) == 5
    assert re.fullmatch(r"[0-9a-f]{40}", summary["provenance"]["commit"])


@pytest.mark.parametrize(
    ("page", "marker", "results", "script", "key"),
    [
        ("README.md", "cifar10-small", "cifar10_small.json", "collect_runs", "summary"),
        ("README.md", "cifar10-small-evaluation", "cifar10_small_evaluation.json", "collect_evaluation", None),
        ("docs/decisions.md", "engine", "benchmark_engine.json", "engine", "rows"),
        ("docs/methods.md", "methods", "benchmark_methods.json", "methods", "rows"),
        ("docs/methods.md", "two-view-digits", "two_view_digits_eight.json", "collect_evaluation", None),
        ("docs/methods.md", "cifar10-eight", "cifar10_eight.json", "collect_evaluation", None),
        ("docs/methods.md", "redundancy", "cifar10_eight_redundancy.json", "redundancy", "rows"),
        ("docs/decisions.md", "corruptions", "benchmark_corruptions.json", "corruptions", "rows"),
        ("docs/two_views.md", "two-views", "two_views.json", "collect_views", None),
        ("docs/two_views.md", "dominoes", "dominoes.json", "collect_views", None),
        ("docs/two_views.md", "dominoes-search", "dominoes_search.json", "search_views", "rows"),
        ("docs/results.md", "tuning", "tuning_cifar10_laptop.json", "collect_studies", None),
        ("docs/results.md", "tuning-ranks", "tuning_cifar10_laptop_ranks.json", "collect_studies", None),
        ("docs/results.md", "laptop-search", "laptop_search.json", "collect_searches", "rows"),
        ("docs/results.md", "laptop-cifar10", "laptop_cifar10.json", "collect_studies", None),
        ("docs/results.md", "text-or-code", "laptop_text_or_code.json", "collect_studies", None),
        ("docs/results.md", "ensemble-size", "laptop_ensemble_size.json", "collect_studies", None),
        ("docs/results.md", "width", "laptop_width.json", "collect_studies", None),
        ("docs/results.md", "priors", "laptop_priors.json", "collect_studies", None),
        ("docs/results.md", "rank", "laptop_rank.json", "collect_studies", None),
        ("docs/results.md", "cam-similarity", "laptop_cam_similarity.json", "collect_studies", None),
        ("docs/results.md", "severity", "laptop_severity.json", "collect_studies", None),
        ("docs/results.md", "longer", "laptop_longer.json", "collect_studies", None),
        ("docs/speed.md", "to-accuracy", "to_accuracy.json", "to_accuracy", "rows"),
        ("docs/speed.md", "bench", "bench.json", "measuring", "rows"),
        ("docs/speed.md", "profile", "bench_profile.json", "profile_step", "rows"),
        ("docs/scaling.md", "communication-counted", "benchmark_communication.json", "communication", "counted"),
        ("docs/scaling.md", "communication-settings", "benchmark_communication.json", "communication", "settings"),
        ("docs/scaling.md", "communication-times", "benchmark_communication.json", "measuring", "times"),
        ("docs/scaling.md", "communication-on-paper", "benchmark_communication.json", "communication", "on_paper"),
    ],
)
def test_tables_in_the_documents_are_those_in_results(page, marker, results, script, key, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    content = json.loads((ROOT / "results" / results).read_text())
    start = f"<!-- {marker}: from results/{results} -->\n"
    shown = re.search(re.escape(start) + r"(.*?)\n<!-- end -->", (ROOT / page).read_text(), flags=re.S)[1]
    assert shown.strip() == importlib.import_module(script).table(content if key is None else content[key])


@pytest.mark.parametrize("name", ["two_views", "dominoes"])
def test_pictures_of_views_are_those_of_results(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    content = json.loads((ROOT / "results" / f"{name}.json").read_text())
    drawn = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
    assert importlib.import_module("collect_views").picture(content) == drawn


def test_links_in_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tests_named_in_the_equations_exist():
    text = (ROOT / "docs" / "equations.md").read_text()
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = re.findall(r"`(test_\w+)\.(test_\w+)", text)
    assert len(named) > 10
    for module, test in named:
        assert f"def {test}" in sources[module], f"{module}.{test}"


def test_modules_import_only_from_those_above_them():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.search(r"a test holds that:(.*?)\.\n", contributing, flags=re.S)[1]
    order = ["version", *re.findall(r"`(\w+)`", listed)[1:]]
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        assert parts[0] in order, f"{path.name} has no place in the list of CONTRIBUTING.md"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "featureflock":
                inner = node.module.split(".")[1:] or [alias.name for alias in node.names]
                for name in inner[:1] if node.module != "featureflock" else inner:
                    assert order.index(name) <= order.index(parts[0]), f"{path.name} imports {name}"


def test_no_module_is_longer_than_a_reader_can_hold():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_public_names_are_documented():
    for name in ff.__all__:
        thing = getattr(ff, name)
        assert isinstance(thing, str) or thing.__doc__, name
