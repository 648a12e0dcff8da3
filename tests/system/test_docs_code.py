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
from helpers.docs_code import ROOT, run_command, run_page
from helpers.published_formats import change_entry, digests, pickled_files, tar_of, web_source
from torch import nn

import featureflock as ff
from featureflock.cli.main import COMMANDS


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
    names = run_page("README.md", loop_names())
    assert names["probs"].shape == (16, 10)
    assert torch.equal(ff.load("my-ensemble").predict(names["loader"][2][0]), names["probs"])


def test_get_started():
    shorter = {"train digits": "train digits --epochs 8", "--examples 200": "--examples 50 --corruptions fog --maps 0"}
    names = run_page("docs/get_started.md", shorter=shorter)
    assert (names["probs"].argmax(1) == names["y"]).double().mean() > 0.5
    assert "Deep Ensembles" in Path("featureflock-report/report.html").read_text()


def test_own_loop_tutorial():
    names = run_page("docs/tutorials/own_loop.md")
    assert (names["probs"].argmax(1) == names["y_test"]).double().mean() > 0.9
    assert torch.equal(ff.load("my-ensemble").predict(names["x_test"]), names["probs"])
    assert names["temperature"] > 0


def test_cifar10_tutorial(server, temp_cache, monkeypatch):
    """On small images of ten colours, which a local server gives out in place of CIFAR-10."""
    rng, arrays = np.random.default_rng(0), {}
    colours = rng.integers(0, 255, (10, 1, 1, 3))
    for part, size in (("train", 200), ("test", 40)):
        labels = np.arange(size) % 10
        noise = rng.integers(-40, 40, (size, 32, 32, 3))
        arrays |= {f"{part}_x": (colours[labels] + noise).clip(0, 255).astype(np.uint8)}
        arrays |= {f"{part}_y": labels.astype(np.uint8)}
    server.content = tar_of(pickled_files("cifar10", arrays), "cifar-10-batches-py")
    sources = (web_source(server, "complete"),)
    change_entry(monkeypatch, "cifar10", train=200, test=40, sha256=digests(arrays), sources=sources)
    names = run_page(
        "docs/tutorials/cifar10.md",
        shorter={
            "--validation 1000": "--validation 40 --subset 100 --epochs 2 --members 2 --batch 20 --decay-epochs",
            "--examples 1000": "--examples 20 --corruptions contrast --maps 0 --ood",
        },
    )
    assert names["temperature"] > 0
    assert ff.load("calibrated").temperature == names["temperature"]
    assert names["probs"].shape == (8, 10)
    assert Path("classifier.pt2").is_file()
    assert Path("featureflock-report/report.html").is_file()


def test_regression_tutorial():
    names = run_page("docs/tutorials/regression.md")
    assert 0.75 < names["inside"] <= 1
    assert torch.allclose(names["total"], names["aleatoric"] + names["epistemic"])
    assert torch.allclose(names["total"], names["variance"])
    assert names["noise"].shape == (82, 1)
    assert names["scores"]["rmse"] < 1


def test_choosing_tutorial():
    names = run_page("docs/tutorials/choosing.md")
    assert 3 <= len(list(Path("tuning").iterdir())) <= 6
    assert names["tuning"].best.method.repulsion > 0
    assert Path("runs/best/ensemble").is_dir()


def test_any_ensemble():
    x = {name: torch.randn(3, 60, 4).softmax(-1) for name in ("probs", "more_probs", "their_probs", "their_more_probs")}
    x |= {name: torch.randn(3, 60, 4).softmax(-1) for name in ("probs_fog", "probs_rain")}
    names = {**x, "probs_svhn": torch.randn(3, 30, 4).softmax(-1), "labels": torch.arange(60) % 4}
    run_page("docs/tutorials/any_ensemble.md", names)
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


def test_many_gpus_tutorial():
    names = run_page("docs/tutorials/many_gpus.md")
    x = names["x"]
    assert torch.equal(ff.load("my-ensemble").predict(x), names["ens"].predict(x))


def test_sklearn_tutorial():
    names = run_page("docs/tutorials/sklearn.md")
    assert names["model"].score(names["X_test"], names["y_test"]) > 0.93
    assert names["search"].best_params_["method"] in names["grid"]["method"]


def test_train_page():
    x, y = torch.randn(564, 64), torch.arange(564) % 10
    names = run_page("docs/commands/train.md", {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
    assert names["result"]["members"] == 5
    assert Path("runs/mine/ensemble").is_dir()


def test_evaluate_page():
    ens = ff.Ensemble([nn.Linear(64, 32) for _ in range(3)], nn.Linear(32, 10))
    names = run_page(
        "docs/commands/evaluate.md", {"ens": ens, "x_test": torch.randn(60, 64), "y_test": torch.arange(60) % 10}
    )
    assert names["log_p"].shape == (60, 10)


def test_tasks_guide():
    names = run_page("docs/guides/tasks.md")
    names["loss"].backward()
    assert names["probs"].shape == (16, 4)
    assert not torch.allclose(names["probs"].sum(-1), torch.ones(16))


def test_methods_guide():
    names = {**loop_names(), "x_train": torch.randn(90, 64), "y_train": torch.arange(90) % 10}
    run_page("docs/guides/methods.md", names)
    assert int(names["ens"].layer.seen) == 90


def test_sharing_guide():
    names = run_page("docs/guides/sharing.md", loop_names())
    x = names["loader"][0][0]
    assert names["ens"].predict(x).shape == names["lora"].predict(x).shape == (16, 10)


def test_prediction_guide():
    run_page("docs/guides/prediction.md")


def test_export_page():
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install featureflock[onnx]")
    ens, x = ff.Ensemble([nn.Linear(64, 32) for _ in range(3)], nn.Linear(32, 10)), torch.randn(16, 64)
    names = run_page("docs/commands/export.md", {"ens": ens, "x": x})
    assert torch.allclose(names["probs"], ens.predict(x), rtol=0, atol=1e-5)


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


def test_every_command_has_a_page():
    pages = {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")}
    assert pages == set(COMMANDS)
    for name in pages:
        assert f"<!-- help: {name}" in (ROOT / "docs" / "commands" / f"{name}.md").read_text()


def test_flags_in_the_docs_exist(capsys, monkeypatch):
    """Every flag of a `featureflock` command line in the docs is in the help of that command."""
    monkeypatch.setenv("COLUMNS", "200")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts]
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *pages])
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    used: dict[str, set[str]] = {}
    for line in lines:
        for command, rest in re.findall(r"featureflock (data \w+|\w+)\b([^`#\n]*)", line):
            used.setdefault(command, set()).update(re.findall(r"(?<=\s)--[a-z][\w.-]*", rest))
    assert {"train", "evaluate", "tune", "reproduce", "predict", "report"} <= used.keys()
    recipes = {"train": "cifar100-resnet32 --method dice", "tune": "cifar10-laptop"}
    for command, flags in used.items():
        if flags:
            run_command(f"featureflock {command} {recipes.get(command, '')} --help")
            shown = capsys.readouterr().out
            missing = [flag for flag in sorted(flags) if flag.partition(".")[0] not in shown and flag not in shown]
            assert missing == [], f"featureflock {command}"
