"""What a person sees of a run: a live bar in a terminal, else a line an epoch; and curves for TensorBoard.

Reading a number off a GPU makes the loop wait for it, so a bar asks for the loss twice a second, not every step.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class RunPlan(NamedTuple):
    """How long a run is, and where it starts."""

    epochs: int
    steps: int
    """In an epoch."""
    images: int
    """In an epoch."""
    first_step: int
    """Steps that an earlier process has done."""
    first_epoch: int
    """Epochs that an earlier process has done and measured."""


Averages = Callable[[], tuple[float, float]]
"""Gives the members' mean cross-entropy and the accuracy (%) so far in this epoch."""


class Reporter:
    """Says nothing. The others say something."""

    def start(self, plan: RunPlan) -> None:
        """Training begins."""

    def step(self, step: int, averages: Averages) -> None:
        """A step is done, the `step`-th of the run."""

    def measuring(self, what: str) -> None:
        """The ensemble is being measured on the `what` set."""

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is done and measured."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def close(self) -> None:
        """Training is over, however it ended."""


class LineReporter(Reporter):
    """A line an epoch."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plan = RunPlan(0, 0, 0, 0, 0)

    def start(self, plan: RunPlan) -> None:
        self.plan = plan

    def epoch(self, line: dict[str, Any]) -> None:
        self._print(epoch_in_words(line, self.plan.epochs))

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        # A reader that goes away (… | head) is no reason to stop: rich falls silent, but would end the program first.
        with contextlib.suppress(SystemExit):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class ProgressBarReporter(LineReporter):
    """A live bar, and above it a line an epoch."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        where, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
        columns = (where, BarColumn(None), status) if console.width >= 100 else (where, status)  # words come first
        self.bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
        self._drawn = 0.0
        self._clock: tuple[int, float] | None = None

    def start(self, plan: RunPlan) -> None:
        super().start(plan)
        self.task = self.bar.add_task("training", total=plan.epochs * plan.steps, completed=plan.first_step, status="")
        self.bar.start()

    def step(self, step: int, averages: Averages) -> None:
        now = time.monotonic()
        if self._clock is None:  # counted from the end of the first step, which may have compiled
            self._clock = step, now
        if now - self._drawn < 0.5:
            return
        self._drawn = now
        epoch, in_epoch = divmod(step - 1, self.plan.steps)
        where = f"epoch {epoch + 1}/{self.plan.epochs} step {in_epoch + 1}/{self.plan.steps}"
        self.bar.update(self.task, completed=step, description=where, status=self._status(step, now, averages))

    def measuring(self, what: str) -> None:
        self.bar.update(self.task, description=f"measuring on the {what} set")

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        self.bar.update(self.task, completed=line["step"])

    def close(self) -> None:
        self.bar.stop()

    def _status(self, step: int, now: float, averages: Averages) -> str:
        loss, accuracy = averages()
        text = f"loss {loss:.3f} accuracy {accuracy:.1f} %"
        assert self._clock is not None
        first, since = self._clock
        if step == first:
            return text
        rate = (step - first) / (now - since)
        left = timedelta(seconds=round((self.plan.epochs * self.plan.steps - step) / rate))
        return f"{text} {rate * self.plan.images / self.plan.steps:,.0f} images/s {left} left"


class TensorBoardReporter(Reporter):
    """Curves for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def start(self, plan: RunPlan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Of what an earlier process wrote, the epochs that are now repeated do not count.
        self.writer = SummaryWriter(str(self.folder), purge_step=plan.first_epoch + 1)

    def epoch(self, line: dict[str, Any]) -> None:
        if self.writer is None:
            return
        try:
            for name, value in _numbers(line):
                if name != "epoch":
                    self.writer.add_scalar(name, value, line["epoch"])
        except Exception:  # a full disk, most often; the same numbers are in metrics.jsonl, which says so
            self.writer = None

    def close(self) -> None:
        if self.writer is not None:
            with contextlib.suppress(Exception):
                self.writer.close()


class ReporterGroup(Reporter):
    """Tells them all."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def start(self, plan: RunPlan) -> None:
        for reporter in self.reporters:
            reporter.start(plan)

    def step(self, step: int, averages: Averages) -> None:
        for reporter in self.reporters:
            reporter.step(step, averages)

    def measuring(self, what: str) -> None:
        for reporter in self.reporters:
            reporter.measuring(what)

    def epoch(self, line: dict[str, Any]) -> None:
        for reporter in self.reporters:
            reporter.epoch(line)

    def note(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.note(text)

    def close(self) -> None:
        for reporter in self.reporters:
            reporter.close()


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed, and sound."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


def epoch_in_words(line: dict[str, Any], epochs: int) -> str:
    """One line about an epoch."""
    parts = [
        f"epoch {line['epoch']}/{epochs}",
        f"learning rate {line['learning_rate']:g}",
        f"loss {line['cross_entropy']:.4f}",
        f"accuracy {line['accuracy']:.2f} %",
    ]
    for part in ("validation", "test"):
        if part in line:
            parts.append(f"{part} {line[part]['accuracy']:.2f} % (NLL {line[part]['nll']:.4f})")
    return ", ".join([*parts, f"{line['images_per_second']:,.0f} images/s"])


def _numbers(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict):
            numbers += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            numbers.append((prefix + key, value))
        elif isinstance(value, list):
            numbers += [(f"{prefix}{key}/{i}", number) for i, number in enumerate(value)]
    return numbers
