"""The comparison with other libraries: the arithmetic of its table, and our part of it. No other library is needed."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def summary(step, to_accuracy, memory, rate):
    return {
        "accuracies": [90.0],
        "peak_memory": memory,
        "wall": {"step": step, "to_accuracy": to_accuracy, "examples_per_second": rate},
        "cpu": {"step": 7 * step, "to_accuracy": to_accuracy, "examples_per_second": rate},
    }


def test_ratios_are_ours_over_theirs_in_the_same_round(module):
    rounds = [
        {"featureflock": summary(1.0, 6.0, 100, 30.0), "TorchEnsemble": summary(2.0, 3.0, 50, 10.0)},
        {"featureflock": summary(3.0, 4.0, 100, 30.0), "TorchEnsemble": summary(4.0, None, 400, 10.0)},
    ]
    rows = module("peer_speed").compare("MLP × 2", 95.0, rounds)
    assert {row["name"]: row["by_round"] for row in rows} == {
        "MLP × 2: time per step, relative to TorchEnsemble": [0.5, 0.75],
        "MLP × 2: time to 95 % accuracy, relative to TorchEnsemble": [2.0],  # the other round has not reached it
        "MLP × 2: peak memory, relative to TorchEnsemble": [2.0, 0.25],
        "MLP × 2: examples predicted per second, relative to TorchEnsemble": [3.0, 3.0],
    }
    assert [row["met"] for row in rows] == [True, False, False, True]


def test_a_measure_that_nobody_reached_has_no_row(module):
    run = summary(1.0, None, 100, 30.0)
    rows = module("peer_speed").compare("MLP × 2", 95.0, [{"featureflock": run, "TorchUncertainty": run}], clock="cpu")
    assert [row["value"] for row in rows] == [1.0, 1.0, 1.0]
    assert rows[0]["ours"] == [7.0]
    assert rows[-1]["accuracies_by_epoch"] == [{"featureflock": [90.0], "TorchUncertainty": [90.0]}]


def test_the_time_to_an_accuracy_is_the_end_of_the_first_epoch_with_it(module):
    time_to = module("peer_training").time_to
    assert time_to(90.0, [1.0, 2.5, 4.0], [80.0, 90.0, 85.0]) == 2.5
    assert time_to(90.1, [1.0, 2.5, 4.0], [80.0, 90.0, 85.0]) is None


def test_evaluations_are_not_timed(module):
    now = iter([(10.0, 1.0), (13.0, 2.0), (20.0, 3.0), (21.0, 3.5)])  # start, end of the epoch, go on, end
    watch = module("peer_training").Stopwatch(now=lambda: next(now))
    watch.start()
    watch.end_of_epoch()
    watch.start()
    assert watch.epochs == [(3.0, 1.0)]
    assert watch.elapsed() == (4.0, 1.5)


def test_the_job_is_trained_and_predicted_here(module):
    training = module("peer_training")
    job = training.JOBS["quick"]["MLP × 2"]
    run = training.Training(job)
    run.watch.start()
    training.train_featureflock(run, compile=False)
    assert len(run.watch.epochs) == len(run.accuracies) == job.epochs
    assert all(a < b for a, b in zip(run.watch.epochs, run.watch.epochs[1:], strict=False))
    x_test, y_test = job.data()[1::2]
    assert 100 * (run.predict(x_test).argmax(-1) == y_test).double().mean() == pytest.approx(run.accuracies[-1])
    assert run.accuracies[-1] > 50


def test_a_library_that_is_not_installed_is_reported(module, monkeypatch):
    training = module("peer_training")
    monkeypatch.setitem(training.IMPORTS, "TorchEnsemble", ("no_such_library",))
    assert "no_such_library" in training.run_library("TorchEnsemble", training.JOBS["quick"]["MLP × 2"])["missing"]
