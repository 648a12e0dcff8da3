"""Failure reporting with threads as ranks: each error is raised by one rank, and lost ranks are named."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

from featureflock.distributed import failures
from featureflock.distributed.failures import (
    AlreadyReported,
    MissingProcesses,
    failure_reporting,
    fresh_store_prefix,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(failures, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.4)


def outcomes(*errors):
    """Raise errors[rank] in each rank, all at the same time; the exceptions that leave `failure_reporting`."""
    store = HashStore()

    def rank(r):
        try:
            with failure_reporting(store, store, r, len(errors), timeout=7):
                time.sleep(0.1)  # until all have sent a heartbeat
                if errors[r] is not None:
                    raise errors[r]
                time.sleep(1)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(rank, range(len(errors))))


def test_an_error_of_all_ranks_is_raised_by_the_first():
    first, *others = outcomes(*[ValueError("wrong flag") for _ in range(3)])
    assert isinstance(first, ValueError)
    assert all(isinstance(other, AlreadyReported) for other in others)


def test_different_errors_are_all_raised():
    first, second = outcomes(ValueError("a"), ValueError("b"))
    assert (str(first), str(second)) == ("a", "b")


def test_a_rank_that_loses_the_connection_to_a_failed_one_is_silent():
    lost, failed = outcomes(RuntimeError("Connection closed by peer"), KeyError("defect"))
    assert isinstance(lost, AlreadyReported)
    assert isinstance(failed, KeyError)
    assert failed.__notes__[0].startswith("This error occurred on rank 1 on ")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("Connection closed by peer", r"rank 1 exited without an error message; was it killed\?"),
        ("Timed out waiting", "No response within 7 s from rank 1, which hangs or has exited."),
    ],
)
def test_a_rank_without_heartbeat_is_named(error, message):
    store = HashStore()
    report = pytest.raises(MissingProcesses, match=message)
    with report, failure_reporting(store, store, 0, 2, timeout=7):
        raise RuntimeError(error)


def test_only_one_rank_reports_a_lost_one(monkeypatch):
    """Two ranks lose the third, which never started, and stop waiting at the same time."""
    store, barrier = HashStore(), threading.Barrier(2)
    monkeypatch.setattr(failures, "_wait_for", lambda condition: barrier.wait(10) < 0)

    def rank(r):
        with failure_reporting(store, store, r, 3, timeout=7):
            time.sleep(0.1)
            raise RuntimeError("Connection reset by peer")

    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(rank, r) for r in range(2)]]
    assert sorted(type(error).__name__ for error in errors) == ["AlreadyReported", "MissingProcesses"]


def test_a_timeout_while_all_ranks_are_alive():
    waiting, _ = outcomes(RuntimeError("Timed out"), None)
    assert str(waiting) == "No response within 7 s, although all processes are alive: Timed out"


@pytest.mark.parametrize("late", [0, 1, 2])
def test_restarted_processes_agree_on_a_prefix_that_their_predecessors_do_not_know(late):
    """Also if one of them is late, and the others find the request of its predecessor first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join(rank, delay):
        time.sleep(delay)
        return fresh_store_prefix([TCPStore("127.0.0.1", store.port)], rank, 3, timeout=20)[0]

    with ThreadPoolExecutor(3) as pool:
        before = list(pool.map(join, range(3), [0.0] * 3))
        after = list(pool.map(join, range(3), [0.2 * (rank == late) for rank in range(3)]))
    after[0].set("key", "")
    assert all(part.check(["key"]) for part in after)
    assert not any(part.check(["key"]) for part in before)


def test_a_process_that_does_not_start_is_named():
    with pytest.raises(MissingProcesses, match=r"No response within 0.1 s from rank 1, 2\."):
        fresh_store_prefix([HashStore()], 0, 3, timeout=0.1)
