"""What processes that work together tell each other when something goes wrong, so that a person reads it once.

They do so in the store that their launcher keeps for them, of which each rank r writes

    who/r        its name, when it begins
    alive/r      another number every second
    failed/r     what went wrong, if it has said so

One that has lost the others ends in silence if another one has said why; or else it names those who do not change their
number any more.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

_BEAT = 1.0
"""Seconds between two signs of life."""
_GRACE = 5.0
"""Seconds within which a process that is alive has given a sign, or has found the mistake that all of them find."""
_LOST = ("timed out", "timeout", "connection", "peer", "socket", "broken pipe")
"""Words in the errors of those who have lost contact."""


class ReportedElsewhere(SystemExit):
    """Another process has said what went wrong; this one ends with it."""


class MissingProcesses(ConnectionError):
    """Other processes did not answer."""


def fresh_store_prefix(stores: Sequence[Any], rank: int, processes: int, timeout: float) -> list[Any]:
    """A part of the store, in each connection to it, that only these processes know.

    torchrun keeps one store for all its restarts, with the addresses of processes that have ended. So the first process
    hands a new name to each that asks under a new name of its own, until all have said that they have it.
    """
    store, own, deadline = stores[0], uuid.uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        store.set(f"featureflock/asks/{rank}", own)
        given = store.get(f"featureflock/given/{own}").decode()
        store.set(f"featureflock/has/{given}/{rank}", "")
        return [PrefixStore(given, each) for each in stores]
    others = set(range(1, processes))
    while others:
        for r in [r for r in others if store.check([f"featureflock/asks/{r}"])]:
            asking = store.get(f"featureflock/asks/{r}").decode()
            store.set(f"featureflock/given/{asking}", own)  # perhaps to one that has ended: ask again next time
        others = {r for r in others if not store.check([f"featureflock/has/{own}/{r}"])}
        if others and time.monotonic() > deadline:
            raise MissingProcesses(f"No answer within {timeout:g} s from rank {', '.join(map(str, sorted(others)))}.")
        time.sleep(0.02 if others else 0)
    return [PrefixStore(own, each) for each in stores]


@contextmanager
def failure_reporting(store: Any, sign: Any, rank: int, processes: int, timeout: float) -> Iterator[None]:
    """For as long as a process works together with others: tell them of its failures, and a person of theirs.

    Args:
        store: of torch.distributed.
        sign: the same store by a connection of its own, for a thread.
        timeout: seconds after which PyTorch gives up waiting, for the message.
    """
    contact = _Contact(store, rank, processes)
    contact.write("who", f"rank {rank} on {socket.gethostname()} (process {os.getpid()})")
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(_Contact(sign, rank, processes), over), daemon=True)
    beating.start()
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:  # a mistake, of which one sentence is enough
        contact.write("failed", str(error))
        if contact.is_said_by_another(str(error)):
            raise ReportedElsewhere(1) from None
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST):
            raise contact.end(error, timeout) from error
        if isinstance(error, Exception):
            error.add_note(f"This was rank {rank} on {socket.gethostname()} (process {os.getpid()}).")
        contact.write("failed", "")
        raise
    finally:
        over.set()
        beating.join()


def _beat(contact: "_Contact", over: threading.Event) -> None:
    with suppress(RuntimeError):  # the store has ended
        while not over.is_set():
            contact.write("alive", str(time.monotonic_ns()))
            over.wait(_BEAT)


class _Contact:
    def __init__(self, store: Any, rank: int, processes: int) -> None:
        self.store, self.rank = store, rank
        self.others = [r for r in range(processes) if r != rank]

    def write(self, what: str, text: str) -> None:
        with suppress(RuntimeError):
            self.store.set(f"featureflock/{what}/{self.rank}", text)

    def read(self, what: str, rank: int) -> str | None:
        key = f"featureflock/{what}/{rank}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else None

    def is_said_by_another(self, mistake: str) -> bool:
        """Whether a process with a lower rank has found the same."""
        lower = [r for r in self.others if r < self.rank]
        with suppress(RuntimeError):
            return _within_grace(lambda: any(self.read("failed", r) == mistake for r in lower)) if lower else False
        return False

    def end(self, error: RuntimeError, timeout: float) -> BaseException:
        """What to raise for an error by which contact was lost."""
        reason = str(error).splitlines()[0]
        try:
            self.store.set_timeout(timedelta(seconds=_GRACE))
            before = {r: self.read("alive", r) for r in self.others}
            failed = _within_grace(lambda: any(self.read("failed", r) is not None for r in self.others))
            silent = [r for r in self.others if self.read("alive", r) == before[r]]
            names = ", ".join(self.read("who", r) or f"rank {r}" for r in silent)
            if failed or self.store.add("featureflock/lost", 1) > 1:
                return ReportedElsewhere(1)
        except RuntimeError:  # the store is gone with the process that kept it
            return MissingProcesses(f"The process that brought the others together has ended: {reason}")
        if not names:
            message = f"No answer within {timeout:g} s, though all processes are alive: {reason}"
        elif "timed out" in reason.lower() or "timeout" in reason.lower():
            message = f"No answer within {timeout:g} s from {names}: stuck, or ended."
        else:
            message = f"{names} ended without a word; was it killed?"
        self.write("failed", message)
        return MissingProcesses(message)


def _within_grace(happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _GRACE
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
