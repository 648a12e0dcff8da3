"""featureflock data corrupt: as a command, and with processes that are interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from helpers.corrupted_files import RAW, THREE, X, Y, manifest, published, quiet
from helpers.published_formats import collection, into, leftovers, pickled_files

from featureflock.cli.data import main
from featureflock.corruptions import (
    copy_set,
    corrupt,
    frost_source,
    generate_set,
    open_set,
)
from featureflock.data import get

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def cifar(tmp_path, own_cache):
    get("cifar10", into(tmp_path / "raw", pickled_files("cifar10", RAW)), say=lambda text: None)


@pytest.mark.usefixtures("cifar")
def test_the_command_makes_a_set_in_the_cache(own_cache, capsys):
    main(["corrupt", "cifar10", "--corruptions", *THREE, "--severities", "1", "3", "--workers", "1"])
    held = open_set(own_cache / "cifar10-c-severities13")
    assert held.corruptions == THREE
    assert np.array_equal(held.pictures("contrast", 3), corrupt(X, "contrast", 3, seed=0, indices=np.arange(7)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Frost is made from {frost_source()}."
    assert "gaussian_noise … (0 of 42 pictures are done)" in lines
    assert lines[-1].startswith("CIFAR-10 corrupted: 3 corruptions × 2 severities, 42 pictures, in ")


@pytest.mark.usefixtures("cifar")
def test_the_command_takes_published_files(tmp_path, own_cache, capsys):
    arrays = published(tmp_path / "theirs", count=7)
    with pytest.raises(ValueError, match="has not the labels of the test set"):
        main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs")])
    np.save(tmp_path / "theirs" / "labels.npy", np.tile(Y, 5))
    main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs")])
    held = open_set(own_cache / "cifar10-c-published")
    assert held.source == f"files in {tmp_path / 'theirs'}"
    for name in THREE:
        assert (held.folder / f"{name}.npy").read_bytes() == (tmp_path / "theirs" / f"{name}.npy").read_bytes()
    main(["corrupt", "cifar10", "--from", str(tmp_path / "theirs"), "--out", str(tmp_path / "o"), "--severities", "4"])
    assert np.array_equal(open_set(tmp_path / "o").pictures("frost", 4), arrays["frost"][21:28])
    with pytest.raises(ValueError, match="cannot be copied into itself"):
        copy_set(open_set(tmp_path / "theirs"), Y, tmp_path / "theirs")


@pytest.mark.usefixtures("cifar")
def test_the_list_shows_corrupted_sets_in_the_cache(tmp_path, own_cache, capsys):
    main(["list"])
    assert "severities" not in capsys.readouterr().out
    main(["corrupt", "cifar10", "--corruptions", "fog", "contrast", "--severities", "1", "3", "--workers", "1"])
    published(own_cache / "CIFAR-10-C")
    published(own_cache / "truncated", names=["fog"])
    (own_cache / "truncated" / "fog.npy").write_bytes((own_cache / "truncated" / "fog.npy").read_bytes()[:-1])
    (own_cache / "begun").mkdir()
    manifest(own_cache / "begun")
    (own_cache / "something else").mkdir()
    capsys.readouterr()
    main(["list"])
    rows = {line.split()[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()}
    size = 2 * (14 * 3072 + 128) / 1e6
    assert rows["cifar10-c-severities13"] == (
        f"cifar10-c-severities13 28 {size:.1f} MB 2 corruptions, severities 1 3 made by featureflock"
    )
    assert rows["CIFAR-10-C"] == "CIFAR-10-C 60 0.2 MB 3 corruptions, severities 1 2 3 4 5 published files"
    assert rows["truncated"].startswith("truncated ? damaged")
    assert rows["begun"].startswith("begun 0 unfinished")
    assert "something" not in rows
    assert "To corrupt the test pictures of one: featureflock data corrupt NAME" in rows.values()


def test_the_command_without_data_or_with_a_wrong_name(capsys):
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not here yet; run: featureflock data get cifar10"):
        main(["corrupt", "cifar10"])
    with pytest.raises(ValueError, match="MNIST is grey; the corruptions are for cifar10 and cifar100"):
        main(["corrupt", "mnist"])
    with pytest.raises(ValueError, match="There is no data set 'cifar11'; did you mean cifar10"):
        main(["corrupt", "cifar11"])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_set_that_processes_make_is_gone_on_with_after_an_interruption(tmp_path, how):
    program = (
        "import sys; sys.argv = ['featureflock', 'data', 'corrupt', 'cifar10', '--workers', '2',\n"
        "    '--corruptions', 'gaussian_noise', 'contrast', 'jpeg_compression', '--severities', '5', '4']\n"
        "from featureflock.cli.main import main\n"
        "if __name__ == '__main__': main()"
    )
    (tmp_path / "run.py").write_text(program)
    big = collection("cifar10", 10, 2000)
    get("cifar10", into(tmp_path / "raw", pickled_files("cifar10", big)), say=lambda text: None)
    with subprocess.Popen(
        [sys.executable, tmp_path / "run.py"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as process:
        for line in process.stdout:
            if line.startswith("jpeg_compression"):
                os.kill(process.pid, how)
        code = process.wait(60)
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9}[how]
    folder = tmp_path / "cache" / "cifar10-c-severities45"
    finished = json.loads((folder / "featureflock.json").read_text())["files"]
    assert list(finished) == ["contrast.npy", "gaussian_noise.npy"]
    assert len(leftovers(folder)) == (2 if how == signal.SIGKILL else 0)  # half a file, and the clean pictures
    for _ in range(100):  # its workers have ended, too
        if not _running(str(tmp_path)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("worker processes are left")
    assert open_set(folder).corruptions == ("gaussian_noise", "contrast")
    seen = []
    x, y = big["test_x"], big["test_y"].astype(int)
    names = ["gaussian_noise", "contrast", "jpeg_compression"]
    options = {"corruptions": names, "severities": (4, 5), "workers": 1}
    generate_set(x, y, folder, progress=lambda *step: seen.append(step), say=quiet, **options)
    assert {what for _, _, what in seen} == {"jpeg_compression"}
    for name in names:
        expected = corrupt(x, name, 5, seed=0, indices=np.arange(2000))
        assert np.array_equal(open_set(folder).pictures(name, 5), expected)


def test_an_interrupt_while_processes_start_gets_one_sentence(tmp_path):
    program = "import sys; from featureflock.cli.main import main\nif __name__ == '__main__': main()"
    (tmp_path / "run.py").write_text(program)
    get("cifar10", into(tmp_path / "raw", pickled_files("cifar10", collection("cifar10", 10, 2000))), say=str)
    arguments = ["data", "corrupt", "cifar10", "--workers", "2", "--corruptions", "jpeg_compression"]
    with subprocess.Popen(
        [sys.executable, tmp_path / "run.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests may ignore Ctrl-C, and processes inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as process:
        process.stdout.readline()
        while not _running(str(tmp_path)):
            time.sleep(0.01)
        time.sleep(0.3)  # they are importing now
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and all its processes
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "featureflock: stopped.\n"
    assert leftovers(tmp_path / "cache" / "cifar10-c") == []


def _running(words):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment, open(f"/proc/{pid}/cmdline", "rb") as command:
                if words.encode() in environment.read() and b"spawn_main" in command.read():
                    found.append(pid)
        except OSError:
            pass
    return found
