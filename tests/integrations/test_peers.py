"""Ensembles of other libraries: trained as docs/guides/coming_from.md prints it, and compared on one page.

They run in an environment of their own, which `make test-integrations` creates.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import featureflock as ff
from featureflock.cli import report as report_command

ROOT = Path(__file__).parents[2]
PEERS = {
    "torchensemble": "TorchEnsemble",
    "torch_uncertainty": "TorchUncertainty, Deep Ensembles",
    "laplace": "laplace-torch, last layer",
}
OURS = ["Deep Ensembles by hand", "featureflock, Deep Ensembles", "featureflock, feature-WGD"]
MISSING = [name for name in PEERS if importlib.util.find_spec(name) is None]
REASON = f"not installed: {', '.join(MISSING)}; run make test-integrations"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder with the results and predictions of all libraries, two seeds and ten epochs."""
    folder = tmp_path_factory.mktemp("peers")
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peers.py", "--quick", "--json", "peers.json", "--save", "."],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_every_block_of_the_page_learns(saved):
    results = json.loads((saved / "peers.json").read_text())
    assert results["missing"] == {}
    scores = {row["library"]: row["scores"]["accuracy"]["mean"] for row in results["rows"]}
    assert scores.keys() == {*PEERS.values(), *OURS}
    assert min(scores.values()) > 0.85


def test_predictions_of_other_libraries_are_compared_on_the_page(saved):
    files = sorted(saved.glob("*.npz"))
    assert len(files) == 12
    report_command.main(["--predictions", *map(str, files), "--baseline", OURS[0], "--data", "digits", "--out", "page"])
    text = Path("page/report.html").read_text()
    results = json.loads(Path("page/results.json").read_text())
    groups = {group["title"]: group for group in results["groups"]}
    assert groups.keys() == {*PEERS.values(), *OURS}
    for title in PEERS.values():
        assert title in text
        assert groups[title]["baseline"] == OURS[0]
        assert groups[title]["differences"]["nll"]["seeds"] == 2
        assert groups[title]["differences"]["nll"]["low"] < groups[title]["differences"]["nll"]["high"]


@pytest.mark.parametrize("name", ["torchensemble", "torchuncertainty-deep-ensembles", "laplace-torch-last-layer"])
def test_scores_are_those_of_the_predictions(saved, name):
    with np.load(saved / f"{name}-seed1.npz") as file:
        probs, labels = file["probs"], file["labels"]
    scores, mean = ff.evaluate(probs, labels), probs.mean(0)
    assert scores["accuracy"] == pytest.approx(
        (mean.argmax(-1) == labels).mean(), abs=1e-3
    )  # halves of 899 differ by one
    assert scores["raw_nll"] == pytest.approx(-np.log(mean[np.arange(len(labels)), labels]).mean(), rel=1e-5)
    assert scores["disagreement"] > 0


def test_speed_and_memory_are_compared_with_both_libraries(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peer_speed.py", "--quick", "--json", "out.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    names = [row["name"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]]
    for peer in ("TorchEnsemble", "TorchUncertainty"):
        assert sum(name.endswith(f"relative to {peer}") for name in names) == 4
