"""The cache of published data sets: verification, format versions, location."""

import os
import shutil
from pathlib import Path

import pooch
import pytest
from helpers.published_formats import assert_cached, partial_files, pickled_files, random_arrays, write_files

from featureflock.data.sources import cache
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get

pytestmark = pytest.mark.usefixtures("temp_cache")


@pytest.fixture
def cached(tmp_path):
    files = pickled_files("cifar10", random_arrays("cifar10"))
    return get("cifar10", write_files(tmp_path / "mine", files), log=lambda text: None)


def test_every_damaged_byte_is_detected_and_get_replaces_the_file(cached, server, served):
    intact = cached.read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    for position in [*range(0, header, 7), *range(header, len(intact), 1501), len(intact) - 1]:
        cached.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with pytest.raises(ValueError, match="run: featureflock data get cifar10"):
            load("cifar10")
    for length in (0, 5, header - 1, header + 10, len(intact) - 1):
        cached.write_bytes(intact[:length])
        with pytest.raises(ValueError, match=r"is damaged: .*; run: featureflock data get cifar10"):
            load("cifar10")
    messages = []
    get("cifar10", log=messages.append)
    assert len(messages) == 1
    assert messages[0].endswith("is damaged: its content has changed; downloading it again.")
    assert_cached("cifar10", served)


def test_a_file_is_verified_once_per_process_and_again_when_it_changes(cached, monkeypatch):
    load("cifar10")  # `get` has not read it
    hashed, sha256 = [], cache.sha256
    monkeypatch.setattr(cache, "sha256", lambda data: hashed.append(1) or sha256(data))
    load("cifar10")
    assert len(hashed) == 1  # of the header
    os.utime(cached)
    load("cifar10")
    assert len(hashed) == 1 + 5


def test_a_file_that_claims_to_be_published_must_have_the_published_digests(served):
    cache.store("cifar10", random_arrays("cifar10", 40, 10, seed=5), source="forged", published=True)
    with pytest.raises(ValueError, match="is damaged"):
        load("cifar10")


def test_the_file_of_another_data_set_is_refused(cached):
    shutil.copy(cached, cache.path_of("cifar100"))
    with pytest.raises(ValueError, match="run: featureflock data get cifar100"):
        load("cifar100")


@pytest.mark.parametrize("version", [0, 2])
def test_another_format_version(cached, monkeypatch, served, version):
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_VERSION", version)
        cache.store("cifar10", served, source="the future", published=True)
    with pytest.raises(ValueError, match=f"has format version {version}, not 1; run: featureflock data get cifar10$"):
        load("cifar10")
    get("cifar10", log=lambda text: None)
    assert_cached("cifar10", served)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_fault_while_the_cache_is_written_leaves_the_previous_data(cached, monkeypatch, served, temp_cache, step):
    before = cached.read_bytes()

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"featureflock.utils.files.os.{step}", fail)
        with pytest.raises(KeyboardInterrupt):
            get("cifar10", log=lambda text: None)
    assert cached.read_bytes() == before
    assert partial_files(temp_cache) == []
    get("cifar10", log=lambda text: None)
    assert_cached("cifar10", served)


def test_the_cache_folder(tmp_path, monkeypatch, temp_cache):
    assert cache.cache_folder() == temp_cache
    monkeypatch.setenv("FEATUREFLOCK_CACHE", "~/elsewhere")
    assert cache.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("FEATUREFLOCK_CACHE")
    assert cache.cache_folder() == pooch.os_cache("featureflock")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == pooch.os_cache("featureflock")


def test_a_cache_folder_that_cannot_be_used(tmp_path, monkeypatch, served):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be used .*; set FEATUREFLOCK_CACHE to another folder\.$"):
        get("cifar10")


def test_similar_names_are_suggested():
    with pytest.raises(ValueError, match=r"There is no data set 'cifar-10'; did you mean cifar10\?"):
        load("cifar-10")
    with pytest.raises(ValueError, match="choose from cifar10, cifar100, mnist, fashion-mnist"):
        get("svhn")
