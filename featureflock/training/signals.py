"""Ctrl-C and SIGTERM, deferred to the end of a training step."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from featureflock.distributed.env import launched_by_torchrun


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted by a signal, after a checkpoint had been written."""

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Record signals in a list instead of raising; a second Ctrl-C interrupts as usual. Main thread only."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if launched_by_torchrun():  # torchrun forwards signals that arrived already, and other ranks wait for this one
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # print is not re-entrant, and the signal may have arrived inside one.
        os.write(sys.stderr.fileno(), b"\nFinishing this step and saving; press Ctrl-C again to stop at once.\n")

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]  # such as nohup
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
