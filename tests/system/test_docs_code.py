"""The code in README.md, docs/ and examples/ runs as it is printed."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.docs_code import ROOT, run_blocks
from torch import nn

import featureflock as ff


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def loop_names() -> dict:
    return {
        "loader": [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)],
        "make_extractor": lambda: nn.Linear(64, 32),
        "make_head": lambda: nn.Linear(32, 10),
    }


def test_readme():
    names = run_blocks("README.md", loop_names(), 2)
    assert names["probs"].shape == (16, 10)
    assert torch.equal(ff.load("my-ensemble").predict(names["loader"][2][0]), names["probs"])
    names["loss"].backward()


def test_training():
    def make_network() -> nn.Module:
        network = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
        network.feature_dim = 8
        return network

    x, y = torch.randn(564, 64), torch.arange(564) % 10
    names = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "make_network": make_network}
    run_blocks("docs/training.md", names, 2)
    assert names["result"]["members"] == 5
    assert Path("runs/mine/ensemble").is_dir()
    assert len(list(Path("tuning").iterdir())) == 20
    assert Path("runs/best/ensemble").is_dir()


def test_evaluation():
    x, y = torch.randn(60, 64), torch.arange(60) % 10
    ens = ff.Ensemble([nn.Linear(64, 32) for _ in range(3)], nn.Linear(32, 10))
    names = {"ens": ens, "x_test": x, "y_test": y, "x_validation": x, "y_validation": y}
    run_blocks("docs/evaluation.md", names)
    assert ens.temperature == names["temperature"] == ff.load("my-ensemble").temperature


def test_any_ensemble():
    x = {name: torch.randn(3, 60, 4).softmax(-1) for name in ("probs", "more_probs", "their_probs", "their_more_probs")}
    x |= {name: torch.randn(3, 60, 4).softmax(-1) for name in ("probs_fog", "probs_rain")}
    names = {**x, "probs_svhn": torch.randn(3, 30, 4).softmax(-1), "labels": torch.arange(60) % 4}
    run_blocks("docs/any_ensemble.md", names, 2)
    assert {"corrupted_nll", "auroc_svhn", "nll_at_severity_1"} <= names["scores"].keys()
    assert "Difference vs Deep Ensembles" in Path("my-report/report.html").read_text()
    assert names["results"].groups[0].baseline == "theirs"
    assert np.array_equal(np.load("mine-seed0.npz")["corrupted/fog/3"], x["probs_fog"])


def test_coming_from(monkeypatch):
    """The blocks that need no other library; tests/integrations/test_peers.py runs the others."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    peers = importlib.import_module("peers")
    names: dict = {}
    exec(peers.blocks()[0].replace("5, 30", "5, 4"), names)
    for section in ("featureflock", "Deep Ensembles by hand", "Compare on one page"):
        for block in peers.blocks(section):
            exec(block, names)
        assert names["probs"].shape == (5, 899, 10)
        assert ff.evaluate(names["probs"].detach(), names["y_test"])["accuracy"] > 0.5
    assert ff.load("my-ensemble").temperature == names["temperature"]
    assert Path("feature-wgd-seed0.npz").is_file()
    sections = [section for section, _ in peers.JOBS.values()]
    assert all(
        peers.blocks(section)[0].rstrip().splitlines()[-1].lstrip().startswith("probs =") for section in sections
    )


def test_tasks():
    x, y = torch.randn(16, 10), torch.randn(16)
    names = run_blocks("docs/tasks.md", {"loader": [(x, y)] * 3, "x_validation": x, "y_validation": y}, 6)
    assert names["scale"] > 0
    assert torch.allclose(names["total"], names["aleatoric"] + names["epistemic"])
    assert names["variance"].shape == (16, 1)
    assert not torch.allclose(names["probs"].sum(-1), torch.ones(16))


def test_scaling():
    names = run_blocks("docs/scaling.md", loop_names())
    x = names["loader"][0][0]
    assert torch.equal(ff.load("my-ensemble").predict(x), names["ens"].predict(x))


def test_methods():
    names = {**loop_names(), "x_train": torch.randn(90, 64), "y_train": torch.arange(90) % 10}
    run_blocks("docs/methods.md", names)
    assert int(names["ens"].layer.seen) == 90


def test_sharing():
    names = run_blocks("docs/sharing.md", loop_names())
    x = names["loader"][0][0]
    assert names["ens"].predict(x).shape == names["lora"].predict(x).shape == (16, 10)


def test_export():
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install featureflock[onnx]")
    ens, x = ff.Ensemble([nn.Linear(64, 32) for _ in range(3)], nn.Linear(32, 10)), torch.randn(16, 64)
    names = run_blocks("docs/export.md", {"ens": ens, "x": x})
    assert torch.allclose(names["probs"], ens.predict(x), rtol=0, atol=1e-5)


def test_speed():
    run_blocks("docs/speed.md", {})


def test_sklearn():
    names = run_blocks("docs/sklearn.md", {})
    assert names["model"].score(names["X_test"], names["y_test"]) > 0.93
    assert names["search"].best_params_["method"] in names["grid"]["method"]


def test_sklearn_example_learns():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "sklearn_estimators.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert float(re.search(r"accuracy ([\d.]+) %", run.stdout)[1]) > 93
    assert 85 < float(re.search(r"(\d+) % within 2 std", run.stdout)[1]) <= 100


def test_example_learns():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_loop.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert float(re.search(r"ensemble accuracy ([\d.]+) %", run.stdout)[1]) > 93


def test_flags_in_the_docs_exist():
    """Every flag of a `featureflock` command line in the docs is in the help of that command."""
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    used: dict[str, set[str]] = {}
    for line in lines:
        for command, rest in re.findall(r"featureflock (data \w+|\w+)\b([^`#\n]*)", line):
            used.setdefault(command, set()).update(re.findall(r"(?<=\s)--[a-z][\w.-]*", rest))
    assert {"train", "evaluate", "tune", "reproduce", "predict", "report"} <= used.keys()
    recipes = {"train": ["cifar100-resnet32", "--method", "dice"], "tune": ["cifar10-laptop"]}
    for command, flags in used.items():
        if not flags:
            continue
        help_of = [sys.executable, "-m", "featureflock", *command.split(), *recipes.get(command, []), "--help"]
        shown = subprocess.run(help_of, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout
        missing = [flag for flag in sorted(flags) if flag.partition(".")[0] not in shown and flag not in shown]
        assert missing == [], f"featureflock {command}"
