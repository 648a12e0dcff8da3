"""Cross-rank failure reporting: every error is printed once.

Processes share a key-value store, which their launcher provides. Rank r writes the keys

    name/r         its rank, host and process id, at the start
    heartbeat/r    a new value every second
    failed/r       its error message, after a failure

A process that loses the connection to the others exits silently if another one has reported the reason. Otherwise it
reports the ranks whose heartbeat has stopped.
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

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

HEARTBEAT_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""Time within which a live process sends a heartbeat, and all processes detect an error that they have in common."""
_CONNECTION_WORDS = ("timed out", "timeout", "connection", "peer", "socket", "broken pipe")
"""A RuntimeError with one of these words means that the connection to another process was lost."""


class AlreadyReported(SystemExit):
    """Raised to exit silently, because another process has reported the error."""


class MissingProcesses(ConnectionError):
    """Other processes did not respond."""


def fresh_store_prefix(stores: Sequence[Any], rank: int, processes: int, timeout: float) -> list[Any]:
    """Return a view of each connection to the store that only the processes of this launch can see.

    torchrun uses one store for all restarts, which still has the addresses of processes that have exited. So every
    process requests a prefix under a random name, and rank 0 sends a new prefix to each until all have confirmed it.
    """
    store, name, deadline = stores[0], uuid.uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        try:
            store.set(f"featureflock/request/{rank}", name)
            prefix = store.get(f"featureflock/prefix/{name}").decode()
            store.set(f"featureflock/confirmed/{prefix}/{rank}", "")
        except DistError as error:
            late = time.monotonic() > deadline - 1
            text = f"No response within {timeout:g} s from rank 0" if late else "The connection to rank 0 was lost"
            raise MissingProcesses(f"{text}; see its error message, or whether it is running.") from error
        return [PrefixStore(prefix, each) for each in stores]
    waiting = set(range(1, processes))
    while waiting:
        for r in [r for r in waiting if store.check([f"featureflock/request/{r}"])]:
            requested_by = store.get(f"featureflock/request/{r}").decode()  # a process may have exited: ask again
            store.set(f"featureflock/prefix/{requested_by}", name)
        waiting = {r for r in waiting if not store.check([f"featureflock/confirmed/{name}/{r}"])}
        if waiting and time.monotonic() > deadline:
            raise MissingProcesses(f"No response within {timeout:g} s from rank {str(sorted(waiting))[1:-1]}.")
        time.sleep(0.02 if waiting else 0)
    return [PrefixStore(name, each) for each in stores]


@contextmanager
def failure_reporting(store: Any, heartbeat_store: Any, rank: int, processes: int, timeout: float) -> Iterator[None]:
    """Share failures with the other processes, so that each failure is reported by one of them.

    `heartbeat_store` is a second connection to `store`; after `timeout` seconds PyTorch stops waiting.
    """
    failures, heartbeat = (_FailureStore(each, rank, processes) for each in (store, heartbeat_store))
    name = f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"
    failures.write("name", name)
    stop = threading.Event()

    def send_heartbeats() -> None:
        while not stop.is_set():
            heartbeat.write("heartbeat", str(time.monotonic_ns()))
            stop.wait(HEARTBEAT_SECONDS)

    thread = threading.Thread(target=send_heartbeats, daemon=True)
    thread.start()
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:  # a user error: one sentence is enough
        failures.write("failed", str(error))
        if failures.reported_by_lower_rank(str(error)):
            raise AlreadyReported(1) from None
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _CONNECTION_WORDS):
            raise failures.explain_lost_connection(error, timeout) from error
        if isinstance(error, Exception):
            error.add_note(f"This error occurred on {name}.")
        failures.write("failed", "")
        raise
    finally:
        stop.set()
        thread.join(GRACE_SECONDS)  # it may wait for a store whose host is lost


class _FailureStore:
    """The keys of all ranks in the store."""

    def __init__(self, store: Any, rank: int, processes: int) -> None:
        self.store, self.rank = store, rank
        self.others = [r for r in range(processes) if r != rank]

    def write(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # the store has been closed
            self.store.set(f"featureflock/{key}/{self.rank}", text)

    def read(self, key: str, rank: int) -> str | None:
        path = f"featureflock/{key}/{rank}"
        return str(self.store.get(path).decode()) if self.store.check([path]) else None

    def reported_by_lower_rank(self, message: str) -> bool:
        """Wait a little, and return whether a lower rank reports the same message."""
        with suppress(RuntimeError):
            return self.rank > 0 and _wait_for(lambda: message in [self.read("failed", r) for r in range(self.rank)])
        return False

    def explain_lost_connection(self, error: RuntimeError, timeout: float) -> BaseException:
        """Return the exception to raise after an error that lost the connection to other processes."""
        reason = str(error).splitlines()[0]
        explained: list[BaseException] = []
        # PyTorch waits without end for a store whose host is lost; a daemon thread may be left waiting.
        thread = threading.Thread(target=lambda: explained.append(self._explain(reason, timeout)), daemon=True)
        thread.start()
        thread.join(3 * GRACE_SECONDS)
        lost = f"The host of the store of all processes does not respond: {reason}"
        return explained[0] if explained else MissingProcesses(lost)

    def _explain(self, reason: str, timeout: float) -> BaseException:
        try:
            self.store.set_timeout(timedelta(seconds=GRACE_SECONDS))
            before = {r: self.read("heartbeat", r) for r in self.others}
            failed = _wait_for(lambda: any(self.read("failed", r) is not None for r in self.others))
            silent = [r for r in self.others if self.read("heartbeat", r) == before[r]]
            names = ", ".join(self.read("name", r) or f"rank {r}" for r in silent)
            if failed or self.store.add("featureflock/lost", 1) > 1:
                return AlreadyReported(1)
        except RuntimeError:  # the process that hosts the store has exited
            return MissingProcesses(f"The process that hosts the store of all processes has exited: {reason}")
        if not names:
            message = f"No response within {timeout:g} s, although all processes are alive: {reason}"
        elif any(word in reason.lower() for word in ("timed out", "timeout")):
            message = f"No response within {timeout:g} s from {names}, which hangs or has exited."
        else:
            message = f"{names} exited without an error message; was it killed?"
        self.write("failed", message)
        return MissingProcesses(message)


def _wait_for(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds, for GRACE_SECONDS at most, and return whether it does."""
    deadline = time.monotonic() + GRACE_SECONDS
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds
