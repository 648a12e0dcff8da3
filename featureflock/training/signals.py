"""Ctrl-C and SIGTERM as a question to be asked between two steps, where nothing is half done."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from featureflock.distributed.env import launched_by_torchrun


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted after a checkpoint had been written."""

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


class SignalFlag:
    """`received` is the first signal that has come, if any."""

    received: signal.Signals | None = None


@contextmanager
def deferred_signals() -> Iterator[SignalFlag]:
    """Note the first signal and go on; a second Ctrl-C ends the process as ever. Only in the main thread."""
    interrupts = SignalFlag()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.received = signal.Signals(number)
        if launched_by_torchrun():  # the launcher passes on what came already, and others are waiting for this process
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not by print: the signal may have come in the midst of one.
        os.write(sys.stderr.fileno(), b"\nFinishing this step, then saving; Ctrl-C once more gives up at once.\n")

    asked = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in asked}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
