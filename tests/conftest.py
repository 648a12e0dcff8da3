"""One thread: the tensors here are tiny, and threads that wait for each other are most of the time."""

import pytest
import torch

pytest.register_assert_rewrite("helpers.published_formats")  # so that its asserts, too, show the values

from helpers.published_formats import Server, alter, collection, digests, on, pickled_files, tar_of  # noqa: E402

torch.set_num_threads(1)

LONG = ("test_benchmarks", "test_resume", "test_house", "test_demo")


def pytest_collection_modifyitems(items):
    """Files that take long go first, so that no process is left alone with one in the end."""
    items.sort(key=lambda item: item.path.stem not in LONG)


# ---- for the tests that get, cache and read the published data sets


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory):
    """Before any other fixture: no test may read or replace what the user has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEATUREFLOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(folder))
    monkeypatch.setenv("NO_PROXY", "*")
    return folder


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def served(server, monkeypatch):
    """CIFAR-10 is a small collection on the server."""
    raw = collection("cifar10", 40, 10)
    server.content = tar_of(pickled_files("cifar10", raw), "cifar-10-batches-py")
    alter(monkeypatch, "cifar10", train=40, test=10, sha256=digests(raw), sources=(on(server, "whole"),))
    return raw
