"""Progress reports of a run: a progress bar in a terminal, otherwise one line per epoch; and curves for TensorBoard.

Reading a number from a GPU blocks the training loop, so the progress bar asks for the loss only twice a second.
"""

import contextlib
import importlib.util
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from featureflock.tasks import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class RunPlan(NamedTuple):
    """Epochs of a run, steps and images per epoch, and the steps and epochs completed before a resume."""

    epochs: int
    steps: int
    images: int
    first_step: int
    first_epoch: int
    faster_processes: int = 1
    """Number of processes that would train faster than this one, or 1."""
    score: str = "accuracy"
    """Name of the score of the task."""


Averages = Callable[[], tuple[float, float]]
"""Returns the mean loss of the members and the score of the task, such as the accuracy in %, of this epoch so far."""


class Reporter:
    """No-op reporter."""

    def start(self, plan: RunPlan) -> None:
        """Training starts."""

    def step(self, step: int, averages: Averages) -> None:
        """Step number `step` of the run is done."""

    def evaluating(self, name: str) -> None:
        """Evaluation on the `name` set starts."""

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch and its evaluation are done; `line` is its line in metrics.jsonl."""

    def log(self, text: str) -> None:
        """A message for the user."""

    def close(self) -> None:
        """Training ended, successfully or not."""


class LineReporter(Reporter):
    """Prints one line per epoch."""

    def __init__(self, console: Console) -> None:
        self.console, self.plan = console, RunPlan(0, 0, 0, 0, 0)

    def start(self, plan: RunPlan) -> None:
        self.plan = plan

    def epoch(self, line: dict[str, Any]) -> None:
        self.log(format_epoch(line, self.plan.epochs))

    def log(self, text: str) -> None:
        # rich exits the program when a pipe is closed (… | head). Training continues instead.
        with contextlib.suppress(SystemExit):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class ProgressBarReporter(LineReporter):
    """Shows a progress bar below one line per epoch."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        position, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
        columns = (position, BarColumn(None), status) if console.width >= 100 else (position, status)
        self.bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
        self._updated = 0.0
        self._first_step: tuple[int, float] | None = None

    def start(self, plan: RunPlan) -> None:
        super().start(plan)
        self.task = self.bar.add_task("training", total=plan.epochs * plan.steps, completed=plan.first_step, status="")
        self.bar.start()

    def step(self, step: int, averages: Averages) -> None:
        now = time.monotonic()
        if now - self._updated < 0.5:
            return
        self._updated = now
        epoch, in_epoch = divmod(step - 1, self.plan.steps)
        position = f"epoch {epoch + 1}/{self.plan.epochs} step {in_epoch + 1}/{self.plan.steps}"
        self.bar.update(self.task, completed=step, description=position, status=self._status(step, now, averages))

    def evaluating(self, name: str) -> None:
        self.bar.update(self.task, description=f"evaluating on the {name} set")

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        self.bar.update(self.task, completed=line["step"])

    def close(self) -> None:
        self.bar.stop()

    def _status(self, step: int, now: float, averages: Averages) -> str:
        loss, score = averages()
        text = f"loss {loss:.3f} {score_text(self.plan.score, score, 1)}"
        if self._first_step is None:  # the rate excludes the first step, which may compile
            self._first_step = step, now
            return text
        first, since = self._first_step
        rate = (step - first) / (now - since)
        left = timedelta(seconds=round((self.plan.epochs * self.plan.steps - step) / rate))
        return f"{text} {rate * self.plan.images / self.plan.steps:,.0f} images/s {left} left"


class TensorBoardReporter(Reporter):
    """Writes learning curves for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():
            raise ImportError('TensorBoard is not installed; run pip install "featureflock[tensorboard]".')
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def start(self, plan: RunPlan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Epochs that are repeated after a resume replace those that were written before.
        self.writer = SummaryWriter(str(self.folder), purge_step=plan.first_epoch + 1)

    def epoch(self, line: dict[str, Any]) -> None:
        if self.writer is None:
            return
        try:
            for name, value in _scalars(line):
                if name != "epoch":
                    self.writer.add_scalar(name, value, line["epoch"])
        except Exception:  # such as a full disk, which writing the same numbers to metrics.jsonl reports
            self.writer = None

    def close(self) -> None:
        if self.writer is not None:
            with contextlib.suppress(Exception):
                self.writer.close()


class ReporterGroup(Reporter):
    """Forwards every call to several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        def forward(name: str, *args: Any) -> None:
            for reporter in reporters:
                getattr(reporter, name)(*args)

        for name in ("start", "step", "evaluating", "epoch", "log", "close"):
            setattr(self, name, partial(forward, name))


def has_tensorboard() -> bool:
    """True if TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def loss_name(task: Task) -> str:
    """Name of the members' mean loss in metrics.jsonl."""
    return "cross_entropy" if task.score == "accuracy" else "member_nll"


def score_text(name: str, value: float, digits: int = 2) -> str:
    """A score with its name: accuracy 97.51 %, or RMSE 54.3."""
    return f"accuracy {value:.{digits}f} %" if name == "accuracy" else f"{name.upper()} {value:.4g}"


def format_epoch(line: dict[str, Any], epochs: int) -> str:
    """Summary of an epoch in one line."""
    score = "accuracy" if "accuracy" in line else "rmse"
    parts = [
        f"epoch {line['epoch']}/{epochs}",
        f"learning rate {line['learning_rate']:g}",
        f"loss {line.get('cross_entropy', line.get('member_nll')):.4f}",
        score_text(score, line[score]),
    ]
    for part in ("validation", "test"):
        if part in line:
            text = score_text(score, line[part][score]).removeprefix("accuracy ")
            parts.append(f"{part} {text} (NLL {line[part]['nll']:.4f})")
    return ", ".join([*parts, f"{line['images_per_second']:,.0f} {'images' if score == 'accuracy' else 'examples'}/s"])


def _scalars(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """All numbers of a nested line, with names such as test/member_nll/0."""
    scalars: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict | list):
            nested = value if isinstance(value, dict) else {str(i): number for i, number in enumerate(value)}
            scalars += _scalars(nested, f"{prefix}{key}/")
        else:
            scalars.append((f"{prefix}{key}", value))
    return scalars
