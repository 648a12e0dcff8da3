"""FLOPs to an accuracy, compared with a manual count for perceptrons."""

import importlib
from pathlib import Path

import pytest
from helpers.short_runs import SHORT

from featureflock.training import ComputeConfig, train

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_flops_are_those_of_the_matrix_products(tmp_path, monkeypatch):
    """Three members see 240 digits of 64 pixels twice, in layers of 16, 8 and 10."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("flops_to_accuracy")
    train(SHORT, tmp_path / "run", compute=ComputeConfig(test_every=1))
    forward = 2 * (64 * 16 + 16 * 8 + 8 * 10)
    row = script._row(tmp_path / "run", at=0.0)
    assert row["forward_flop"] == forward
    assert row["flop_by_epoch"] == [3 * forward * 240 * 3, 3 * forward * 480 * 3]
    assert row["flop"] == row["flop_by_epoch"][1]
    assert row["flop_to"] == row["flop_by_epoch"][0]
    last = script._row(tmp_path / "run", at=row["accuracy"])
    assert last["flop_to"] == row["flop_by_epoch"][0 if row["accuracy_by_epoch"][0] >= row["accuracy"] else 1]
    never = script._row(tmp_path / "run", at=100.1)
    assert never["flop_to"] is None
    assert "not reached" in script.table([never])
    assert row["accuracy_by_epoch"][1] == pytest.approx(row["accuracy"])
