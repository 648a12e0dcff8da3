"""Rendezvous: every process connects to the key-value store that torchrun, or rank 0, hosts at MASTER_ADDR:MASTER_PORT.

A launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What goes wrong here is an error of the launch, so each
error is one sentence that names the variable, host or port. A connection is tried with plain sockets first: PyTorch's
own errors do not tell an unknown host from a missing process.
"""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from featureflock.distributed.env import ADVICE, launch_number, world_size

NAME_SECONDS = 60.0
"""Time in which the name of a host must be found; that of a new container may not be known at once."""


class RendezvousError(ConnectionError):
    """The processes of a launch cannot find each other."""


class Launch(NamedTuple):
    """This process and the host of the store, from the variables of the launcher."""

    rank: int
    processes: int
    host: str
    port: int
    hosts_store: bool
    """Whether this process hosts the store, and not torchrun."""


def read_launch() -> Launch:
    """Read the variables of the launcher; ValueError if one is missing or wrong."""
    processes = world_size()
    rank = launch_number("RANK", 0, processes - 1)
    host = os.environ.get("MASTER_ADDR", "").strip()
    if not host:
        raise ValueError(f"MASTER_ADDR is not set; {ADVICE}.")
    port = launch_number("MASTER_PORT", 1, 65535)
    return Launch(rank, processes, host, port, rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def connect(launch: Launch, timeout: float, connections: int = 2) -> list[Any]:
    """Return connections to the store, after at most `timeout` seconds. RendezvousError if it cannot be reached."""
    where = f"{launch.host}:{launch.port} (MASTER_ADDR and MASTER_PORT)"
    deadline = time.monotonic() + timeout
    _find_host(launch.host, min(timeout, NAME_SECONDS))
    if launch.hosts_store:
        _check_port(launch.port)
    else:
        _wait_for_store(launch, deadline, f"No process listens on {where} within {timeout:g} s; is rank 0 running?")
    opened: list[list[Any] | DistError] = []
    # PyTorch waits for an answer without end, if another program listens; a daemon thread may be left waiting.
    thread = threading.Thread(target=lambda: opened.append(_open(launch, timeout, connections)), daemon=True)
    with _without_native_messages():
        thread.start()
        thread.join(max(1.0, deadline - time.monotonic()) + 1.0)  # PyTorch's own error, after `timeout`, comes first
    if not opened:
        raise RendezvousError(f"What listens on {where} is not the store of these processes; choose another port.")
    if isinstance(opened[0], DistError):
        raise RendezvousError(f"The store at {where} cannot be used: {str(opened[0]).splitlines()[0]}") from opened[0]
    return opened[0]


def _open(launch: Launch, timeout: float, connections: int) -> list[Any] | DistError:
    try:
        return [
            TCPStore(
                launch.host,
                launch.port,
                launch.processes,
                is_master=launch.hosts_store,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=launch.hosts_store,
            )
            for _ in range(connections)
        ]
    except DistError as error:
        return error


@contextmanager
def _without_native_messages() -> Iterator[None]:
    """Discard what C++ code prints: pages of stack frames for each failed connection."""
    sys.stderr.flush()
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def _find_host(host: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                text = f"The host {host!r} (MASTER_ADDR) is unknown on this machine"
                raise RendezvousError(f"{text}; give the name or address of the host of rank 0.") from error
            time.sleep(0.2)


def _check_port(port: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = "is used by another program; choose another one"
            else:
                reason = f"cannot be used ({error.strerror}); choose another one"
            raise RendezvousError(f"The port {port} (MASTER_PORT) {reason}.") from error


def _wait_for_store(launch: Launch, deadline: float, message: str) -> None:
    while True:
        try:
            socket.create_connection((launch.host, launch.port), max(0.1, min(10, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(message) from error
            time.sleep(0.1)
