"""Reporters: lines, progress bar, TensorBoard."""

import io
import re
import sys

import pytest
from rich.console import Console

from featureflock.training import LineReporter, ProgressBarReporter, Reporter, ReporterGroup, TensorBoardReporter
from featureflock.training.reporters import RunPlan, format_epoch

LINE = {
    "epoch": 2,
    "step": 8,
    "learning_rate": 0.1,
    "cross_entropy": 0.5,
    "accuracy": 81.25,
    "images_per_second": 1234.5,
}


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def test_an_epoch_is_summarised_in_one_line():
    assert format_epoch(LINE, 3) == "epoch 2/3, learning rate 0.1, loss 0.5000, accuracy 81.25 %, 1,234 images/s"
    test = {"accuracy": 90.0, "nll": 0.25}
    assert ", test 90.00 % (NLL 0.2500), " in format_epoch({**LINE, "test": test}, 3)


@pytest.mark.parametrize(("width", "has_bar"), [(160, True), (80, False)])
def test_the_progress_bar_shows_position_loss_rate_and_time_left(width, has_bar, monkeypatch):
    clock = iter([100.0, 110.0])
    console = terminal(width)
    reporter = ProgressBarReporter(console)
    monkeypatch.setattr("featureflock.training.reporters.time.monotonic", lambda: next(clock))
    reporter.start(RunPlan(epochs=3, steps=4, images=200, first_step=0, first_epoch=0))
    reporter.step(1, lambda: (2.3, 10.0))
    reporter.step(6, lambda: (1.5, 40.0))
    reporter.bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    # 5 steps of 50 images in 10 s; 6 of 12 steps are left.
    assert "epoch 2/3 step 2/4" in text
    assert "loss 1.500 accuracy 40.0 % 25 images/s 0:00:12 left" in text
    assert ("━" in text) == has_bar
    reporter.evaluating("test")
    reporter.epoch(LINE)
    reporter.close()
    assert "evaluating on the test set" in console.file.getvalue()
    assert "epoch 2/3, learning rate 0.1" in console.file.getvalue()


def test_a_closed_pipe_does_not_stop_training():
    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    LineReporter(Console(file=ClosedPipe())).log("text")


def test_a_group_forwards_every_call():
    calls = []

    class Recorder(Reporter):
        def __getattribute__(self, name):
            return lambda *args: calls.append((name, args))

    group = ReporterGroup(Recorder(), Recorder())
    methods = [name for name, value in vars(Reporter).items() if callable(value) and not name.startswith("_")]
    arguments = {"start": (1,), "step": (1, 2), "evaluating": ("a",), "epoch": ({},), "log": ("b",), "close": ()}
    assert set(methods) == set(arguments)
    for name in methods:
        getattr(group, name)(*arguments[name])
    assert calls == [(name, arguments[name]) for name in methods for _ in range(2)]


def test_missing_tensorboard_is_reported_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install \"featureflock\[tensorboard\]\""):
        TensorBoardReporter(tmp_path)
