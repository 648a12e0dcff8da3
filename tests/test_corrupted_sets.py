"""Sets of corrupted pictures on disk: the published layout, going on after an interruption, and the command."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from published_formats import collection, into, leftovers, pickled_files

from featureflock.commands.data import main
from featureflock.corruptions import (
    CORRUPTIONS,
    copy_set,
    corrupt,
    frost,
    frost_source,
    make_set,
    making,
    open_set,
    read_imagenet_c,
    writing,
)
from featureflock.corruptions.frost import frost_views
from featureflock.corruptions.sets import FORMAT, VERSION
from featureflock.data import get
from featureflock.data.examples import unit_scale

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")
RAW = collection("cifar10", 10, 7)
X, Y = RAW["test_x"], RAW["test_y"]
THREE = ("gaussian_noise", "frost", "contrast")


def quiet(text):
    raise AssertionError(text)


def published(folder, count=4, severities=5, names=THREE, dtype=np.uint8):
    """What somebody downloaded."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    arrays = {name: rng.integers(0, 256, (severities * count, 32, 32, 3)).astype(dtype) for name in names}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "labels.npy", np.tile(np.arange(count, dtype=np.uint8), severities))
    return arrays


def zipped(path):
    with open(path, "wb") as file:
        np.savez(file, x=np.zeros(3))


def manifest(folder, **changes):
    whole = {"format": FORMAT, "version": VERSION, "severities": [1], "files": {}, "source": "", **changes}
    (folder / "featureflock.json").write_text(json.dumps(whole))


# ---- reading


def test_published_files_are_read_from_the_disk(tmp_path):
    arrays = published(tmp_path / "c")
    held = open_set(tmp_path / "c")
    assert held.corruptions == THREE
    assert held.severities == (1, 2, 3, 4, 5)
    assert held.labels.tolist() == [0, 1, 2, 3]
    third = held.pictures("frost", 3)
    assert isinstance(third, np.memmap)
    assert np.array_equal(third, arrays["frost"][8:12])
    examples = held.examples("contrast", 5, unit_scale((0.5,) * 3, (0.25,) * 3))
    x, y, _ = next(examples.batches([torch.tensor([3])], CPU))
    assert y.tolist() == [3]
    expected = (arrays["contrast"][19].transpose(2, 0, 1) / 255 - 0.5) / 0.25
    assert np.abs(x[0].numpy() - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "labels.npy").unlink(), "There is no .*labels.npy"),
        (lambda f: (f / "labels.npy").write_bytes(b"x"), "labels.npy is truncated or damaged"),
        (lambda f: np.save(f / "labels.npy", np.arange(20)), "other labels for some severities"),
        (lambda f: np.save(f / "labels.npy", np.zeros(19, int)), "5 × N were expected"),
        (lambda f: np.save(f / "labels.npy", np.zeros(25, int)), "20 pictures; 5 × 5 were expected"),
        (lambda f: np.save(f / "fog.npy", np.zeros((20, 32, 32))), "holds float64 of shape"),
        (lambda f: (f / "fog.npy").write_bytes((f / "fog.npy").read_bytes()[:-1]), "fog.npy is truncated or damaged"),
        (lambda f: np.save(f / "fog.npy", np.array([{}]), allow_pickle=True), "fog.npy is truncated or damaged"),
        (lambda f: (f / "fog.npy").unlink(), "holds no corrupted pictures"),
        (lambda f: (f / "featureflock.json").write_text("{"), "is no JSON"),
        (lambda f: (f / "featureflock.json").write_text("[]"), "this version of featureflock reads"),
        (lambda f: (f / "fog.npy").write_bytes(b""), "fog.npy is truncated or damaged"),
        (lambda f: zipped(f / "fog.npy"), "fog.npy is truncated or damaged"),
        (lambda f: zipped(f / "labels.npy"), "labels.npy is truncated or damaged"),
        (lambda f: manifest(f, severities=None), "something is missing in it"),
        (lambda f: manifest(f, severities=[]), "something is missing in it"),
        (lambda f: manifest(f, files=[]), "something is missing in it"),
        (lambda f: manifest(f, files={"fog.npy": {}}), "something is missing in it"),
        (lambda f: manifest(f, source=None), "something is missing in it"),
    ],
)
def test_damaged_sets_get_a_sentence(tmp_path, spoil, message):
    published(tmp_path / "c", names=["fog"])
    spoil(tmp_path / "c")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_set(tmp_path / "c").pictures("fog", 1)


def test_what_is_not_there_gets_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        open_set(tmp_path / "nowhere")
    published(tmp_path / "c")
    for arguments, message in ((("fog", 1), "has no fog.npy"), (("frost", 6), "severities 1, 2, 3, 4, 5; got 6")):
        with pytest.raises(ValueError, match=message):
            open_set(tmp_path / "c").pictures(*arguments)


@pytest.mark.parametrize("workers", [0, 2])
def test_imagenet_c_is_read_without_cropping_again(tmp_path, workers):
    rng = np.random.default_rng(0)
    for name in ("n01440764", "n01443537"):
        folder = tmp_path / "fog" / "2" / name
        folder.mkdir(parents=True)
        for k in range(3):
            Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(folder / f"{k}.JPEG")
    classes = ["n01440764", "n01443000", "n01443537"]
    examples = read_imagenet_c(tmp_path, "fog", 2, classes=classes, workers=workers)
    assert examples.labels.tolist() == [0, 0, 0, 2, 2, 2]
    assert read_imagenet_c(tmp_path, "fog", 2).labels.tolist() == [0, 0, 0, 1, 1, 1]
    x = next(examples.batches([torch.tensor([4])], CPU)).x[0]
    whole = np.array(Image.open(tmp_path / "fog" / "2" / "n01443537" / "1.JPEG")).transpose(2, 0, 1)
    mean, deviation = (np.array(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.abs(x.numpy() - (whole / 255 - mean) / deviation).max() < 1e-5
    for arguments, message in (
        (("fog", 3), "ImageNet-C is a tree"),
        (("fog", 7), "severity must be"),
        (("fogg", 2), "did you mean fog"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_imagenet_c(tmp_path, *arguments)
    with pytest.raises(ValueError, match="has the class n01443537, which is not one of the 1 classes"):
        read_imagenet_c(tmp_path, "fog", 2, classes=classes[:1])


# ---- making


def test_a_set_is_in_the_published_layout(tmp_path):
    make_set(X, Y, tmp_path / "c", workers=1, seed=np.int64(5))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == sorted(
        [*(f"{name}.npy" for name in CORRUPTIONS), "labels.npy", "featureflock.json"]
    )
    labels = np.load(tmp_path / "c" / "labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == 5 * Y.tolist()
    for name in CORRUPTIONS:
        array = np.load(tmp_path / "c" / f"{name}.npy")
        blocks = [corrupt(X, name, severity, seed=5, indices=np.arange(7)) for severity in (1, 2, 3, 4, 5)]
        assert np.array_equal(array, np.concatenate(blocks))


def test_the_size_of_tasks_does_not_change_a_byte(tmp_path, monkeypatch):
    x, y = np.resize(X, (1100, 32, 32, 3)), np.resize(Y, 1100)
    options = {"corruptions": ["impulse_noise", "fog"], "severities": (5, 2), "workers": 1}
    seen = []
    make_set(x, y, tmp_path / "a", progress=lambda *step: seen.append(step), **options)
    monkeypatch.setattr(making, "_TASK", 333)
    make_set(x, y, tmp_path / "b", **options)
    for file in ("impulse_noise.npy", "fog.npy", "labels.npy", "featureflock.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    held = open_set(tmp_path / "a")
    assert held.severities == (2, 5)
    chosen = corrupt(x[1000:1002], "fog", 5, seed=0, indices=[1000, 1001])
    assert np.array_equal(held.pictures("fog", 5)[1000:1002], chosen)
    assert seen[0] == (0, 4400, "impulse_noise")
    assert seen[-1] == (4400, 4400, "fog")


def test_what_is_finished_is_not_made_again_and_what_is_damaged_is(tmp_path, monkeypatch):
    options = {"corruptions": THREE, "severities": (1,), "workers": 1}
    make_set(X, Y, tmp_path / "c", **options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")}
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(making, "corrupt", lambda images, *_, **__: quiet("made again") if len(images) else None)
        make_set(X, Y, tmp_path / "c", progress=lambda *step: seen.append(step), say=quiet, **options)
    assert seen == []
    path = tmp_path / "c" / "frost.npy"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    (tmp_path / "c" / "contrast.npy").unlink()
    said = []
    make_set(X, Y, tmp_path / "c", progress=lambda *step: seen.append(step), say=said.append, **options)
    assert said == ["frost.npy is damaged; making it again."]
    assert {what for _, _, what in seen} == {"frost", "contrast"}
    assert seen[0][0] == 7
    assert path.read_bytes() == sound
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")} == before


def test_frost_is_made_again_from_something_better(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(frost, "_photographs", lambda: None)
        frost_views.cache_clear()
        make_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1)
    frost_views.cache_clear()
    if "procedural" in frost_source():
        pytest.skip("the photographs are not installed")
    said = []
    make_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("frost.npy was made from procedural textures")
    assert "again from the photographs" in said[0]


def test_other_sets_and_other_peoples_files_are_left_alone(tmp_path):
    options = {"corruptions": ["contrast"], "workers": 1}
    make_set(X, Y, tmp_path / "c", severities=(1,), **options)
    before = (tmp_path / "c" / "contrast.npy").read_bytes()
    for changes, message in (
        ({"severities": (1, 2)}, r"holds another set \(severities: \[1\], not \[1, 2\]\)"),
        ({"severities": (1,), "seed": 1}, r"another set \(seed: 0, not 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make_set(X, Y, tmp_path / "c", **options, **changes)
    with pytest.raises(ValueError, match=r"another set \(data: "):
        make_set(255 - X, Y, tmp_path / "c", severities=(1,), **options)
    published(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"contrast\.npy was not made by featureflock"):
        make_set(X, Y, tmp_path / "theirs", **options)
    assert (tmp_path / "c" / "contrast.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"severities": (0, 1)}, "severities must be some of 1, 2, 3, 4 and 5; got 0, 1"),
        ({"severities": ()}, "severities must be"),
        ({"severities": (1.0,)}, "severities must be"),
        ({"workers": -1}, "workers must be at least 0; got -1"),
        ({"corruptions": ()}, "At least one corruption"),
        ({"corruptions": ("fogg",)}, "did you mean fog"),
        ({"labels": Y[:3]}, "a label for each of 7 pictures; got uint8 of shape"),
        ({"labels": Y.astype(int) + 300}, "from 0 to 255"),
        ({"images": X[..., :1]}, "must be a NumPy array of uint8"),
        ({"seed": 2**32}, "seed must be"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path, changes, message):
    arguments = {"images": X, "labels": Y, "folder": tmp_path / "c"} | changes
    with pytest.raises(ValueError, match=message):
        make_set(**arguments)
    assert not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be used .*; give another folder"):
        make_set(X, Y, tmp_path / "file" / "c", workers=1)


def test_a_folder_that_cannot_be_written_to_gets_a_sentence(tmp_path, monkeypatch):
    def refused(path, data):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(writing, "write_atomically", refused)  # root may write to folders that others may only read
    with pytest.raises(OSError, match=r"c cannot be used \(Permission denied\); give another folder"):
        make_set(X, Y, tmp_path / "c", workers=1)


def test_workers_get_the_pictures_by_a_file_and_leave_none(tmp_path):
    """Sent to each process, they would keep the next from starting."""
    images = np.resize(X, (600, 32, 32, 3))
    made = making._made(images, [("contrast", 1, 0, 0), ("contrast", 1, 0, 500)], 2, tmp_path)
    first = next(made)
    (work,) = tmp_path.iterdir()
    assert [path.name for path in work.iterdir()] == ["clean.npy"]
    expected = corrupt(images, "contrast", 1, seed=0, indices=np.arange(600))
    assert first + next(made) == expected.tobytes()
    made.close()
    assert list(tmp_path.iterdir()) == []


# ---- the command


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
        "from featureflock.cli import main\n"
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
    make_set(x, y, folder, progress=lambda *step: seen.append(step), say=quiet, **options)
    assert {what for _, _, what in seen} == {"jpeg_compression"}
    for name in names:
        expected = corrupt(x, name, 5, seed=0, indices=np.arange(2000))
        assert np.array_equal(open_set(folder).pictures(name, 5), expected)


def test_an_interrupt_while_processes_start_gets_one_sentence(tmp_path):
    program = "import sys; from featureflock.cli import main\nif __name__ == '__main__': main()"
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
