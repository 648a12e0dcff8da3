"""What the README shows runs, what it says is in results/, and modules import only from those above them."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import featureflock as ff

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


def test_tables_in_the_documents_are_those_in_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    tables = importlib.import_module("write_tables")
    assert tables.outdated() == []
    assert tables.unregistered() == []


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
