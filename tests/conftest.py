"""Fixtures for all tests: one thread, a temporary data cache, and a server of data sets with faults."""

import signal

import pytest
import torch

pytest.register_assert_rewrite("helpers.published_formats")

from helpers.published_formats import (  # noqa: E402
    Server,
    change_entry,
    digests,
    pickled_files,
    random_arrays,
    tar_of,
    web_source,
)

torch.set_num_threads(1)  # tensors are tiny, and waiting threads would take most of the time
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; some tests send SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def hide_user_cache(tmp_path_factory):
    """No test reads or replaces the user's data sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEATUREFLOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def temp_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(folder))
    monkeypatch.setenv("NO_PROXY", "*")
    return folder


@pytest.fixture
def server():
    """A local HTTP server."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def served(server, monkeypatch):
    """CIFAR-10 replaced by 40 + 10 random images on the server; returns its arrays."""
    arrays = random_arrays("cifar10", 40, 10)
    server.content = tar_of(pickled_files("cifar10", arrays), "cifar-10-batches-py")
    sources = (web_source(server, "complete"),)
    change_entry(monkeypatch, "cifar10", train=40, test=10, sha256=digests(arrays), sources=sources)
    return arrays
