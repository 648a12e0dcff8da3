"""Errors of a launch: each is one sentence that names what is wrong."""

import contextlib
import socket
import threading
import time

import pytest

from featureflock.distributed import rendezvous
from featureflock.distributed.failures import MissingProcesses, fresh_store_prefix
from featureflock.distributed.rendezvous import RendezvousError, connect, read_launch

LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def launch(monkeypatch):
    """Set the variables of a launcher, and read them."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def read(**changes):
        for name, value in (LAUNCH | {key: str(value) for key, value in changes.items()}).items():
            monkeypatch.setenv(name, value)
        return read_launch()

    return read


@pytest.fixture
def listener():
    """A program that listens on a port and never answers."""
    before = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
    for thread in {*threading.enumerate()} - before:  # which still wait for an answer, and print that there is none
        thread.join(10)


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; start the processes with torchrun"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be a number from 1 to 65535; got 'abc'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a number from 1 to 65535; got '65536'"),
        ({"RANK": "2"}, "RANK must be a number from 0 to 1; got '2'"),
        ({"RANK": "-1"}, "RANK must be a number from 0 to 1; got '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number from 1 to 1000000; got 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a number from 1"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be a number from 1"),
    ],
)
def test_variables_that_are_missing_or_wrong(launch, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        launch(**changes)
    assert len(str(caught.value)) < 200


def test_a_port_that_is_used_by_another_program(launch, listener):
    with pytest.raises(RendezvousError, match=rf"The port {listener} \(MASTER_PORT\) is used by another program"):
        connect(launch(MASTER_PORT=listener), 1)
    with pytest.raises(RendezvousError, match=rf"What listens on 127\.0\.0\.1:{listener} .* is not the store"):
        connect(launch(RANK=1, MASTER_PORT=listener), 1)


def test_a_program_that_answers_something_else(launch, capfd):
    """As a web server does, which closes the connection."""

    def answer():
        for _ in range(20):
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RendezvousError, match=r"is not the store|cannot be used") as caught:
            connect(launch(RANK=1, MASTER_PORT=server.getsockname()[1]), 2)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_host_that_is_unknown(launch, monkeypatch):
    monkeypatch.setattr(rendezvous, "NAME_SECONDS", 0.1)
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=r"The host 'nowhere\.invalid' \(MASTER_ADDR\) is unknown on this"):
            connect(launch(RANK=rank, MASTER_ADDR="nowhere.invalid"), 600)
    with pytest.raises(RendezvousError, match=r"The host 'a\.\.b' \(MASTER_ADDR\) is unknown"):
        connect(launch(MASTER_ADDR="a..b"), 600)


def test_a_rank_zero_that_is_missing(launch):
    port = unused_port()
    with pytest.raises(
        RendezvousError, match=rf"No process listens on 127\.0\.0\.1:{port} .* within 0\.5 s; is rank 0"
    ):
        connect(launch(RANK=1, MASTER_PORT=port), 0.5)


def test_other_ranks_that_are_missing(launch):
    port = unused_port()
    stores = connect(launch(WORLD_SIZE=3, MASTER_PORT=port), 5)
    with pytest.raises(MissingProcesses, match=r"No response within 0\.5 s from rank 1, 2\."):
        fresh_store_prefix(stores, 0, 3, 0.5)
    client = connect(launch(RANK=1, WORLD_SIZE=3, MASTER_PORT=port), 1)
    with pytest.raises(MissingProcesses, match=r"No response within 1 s from rank 0; see its error message"):
        fresh_store_prefix(client, 1, 3, 1)


def test_a_name_that_is_known_after_a_while(launch, monkeypatch):
    """That of a new container, for example."""
    known_at, look_up = time.monotonic() + 0.5, socket.getaddrinfo

    def slow(host, *args):
        if time.monotonic() < known_at:
            raise socket.gaierror("unknown")
        return look_up(host, *args)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert len(connect(launch(MASTER_PORT=unused_port(), MASTER_ADDR="localhost"), 5)) == 2
