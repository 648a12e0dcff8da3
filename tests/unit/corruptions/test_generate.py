"""Generating corrupted sets: layout, resuming, and wrong arguments."""

import errno

import numpy as np
import pytest
from helpers.corrupted_files import THREE, X, Y, no_messages, published

from featureflock.corruptions import CORRUPTIONS, corrupt, frost, frost_source, generate, generate_set, open_set
from featureflock.corruptions.frost import frost_views
from featureflock.utils import files


def test_a_generated_set_has_the_published_layout(tmp_path):
    generate_set(X, Y, tmp_path / "c", workers=1, seed=np.int64(5))
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


def test_the_task_size_does_not_change_a_byte(tmp_path, monkeypatch):
    x, y = np.resize(X, (1100, 32, 32, 3)), np.resize(Y, 1100)
    options = {"corruptions": ["impulse_noise", "fog"], "severities": (5, 2), "workers": 1}
    steps = []
    generate_set(x, y, tmp_path / "a", progress=lambda *step: steps.append(step), **options)
    monkeypatch.setattr(generate, "_TASK_SIZE", 333)
    generate_set(x, y, tmp_path / "b", **options)
    for file in ("impulse_noise.npy", "fog.npy", "labels.npy", "featureflock.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    corrupted = open_set(tmp_path / "a")
    assert corrupted.severities == (2, 5)
    chosen = corrupt(x[1000:1002], "fog", 5, seed=0, indices=[1000, 1001])
    assert np.array_equal(corrupted.images("fog", 5)[1000:1002], chosen)
    assert steps[0] == (0, 4400, "impulse_noise")
    assert steps[-1] == (4400, 4400, "fog")


def test_finished_files_are_not_generated_again_but_damaged_ones_are(tmp_path, monkeypatch):
    options = {"corruptions": THREE, "severities": (1,), "workers": 1}
    generate_set(X, Y, tmp_path / "c", **options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")}
    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(generate, "corrupt", lambda images, *_, **__: no_messages("again") if len(images) else None)
        generate_set(X, Y, tmp_path / "c", progress=lambda *step: steps.append(step), log=no_messages, **options)
    assert steps == []
    path = tmp_path / "c" / "frost.npy"
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    (tmp_path / "c" / "contrast.npy").unlink()
    messages = []
    generate_set(X, Y, tmp_path / "c", progress=lambda *step: steps.append(step), log=messages.append, **options)
    assert messages == ["frost.npy is damaged; generating it again."]
    assert {name for _, _, name in steps} == {"frost", "contrast"}
    assert steps[0][0] == 7
    assert path.read_bytes() == intact
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")} == before


def test_frost_is_generated_again_when_photographs_are_installed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(frost, "_photographs", lambda: None)
        frost_views.cache_clear()
        generate_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1)
    frost_views.cache_clear()
    if "procedural" in frost_source():
        pytest.skip("the photographs are not installed")
    messages = []
    generate_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1, log=messages.append)
    assert len(messages) == 1
    assert messages[0].startswith("frost.npy was made from procedural textures")
    assert "again from the photographs" in messages[0]


def test_other_sets_and_files_of_the_user_are_not_overwritten(tmp_path):
    options = {"corruptions": ["contrast"], "workers": 1}
    generate_set(X, Y, tmp_path / "c", severities=(1,), **options)
    before = (tmp_path / "c" / "contrast.npy").read_bytes()
    for changes, message in (
        ({"severities": (1, 2)}, r"contains another set \(severities: \[1\], not \[1, 2\]\)"),
        ({"severities": (1,), "seed": 1}, r"another set \(seed: 0, not 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_set(X, Y, tmp_path / "c", **options, **changes)
    with pytest.raises(ValueError, match=r"another set \(data: "):
        generate_set(255 - X, Y, tmp_path / "c", severities=(1,), **options)
    published(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"contrast\.npy was not made by featureflock"):
        generate_set(X, Y, tmp_path / "theirs", **options)
    assert (tmp_path / "c" / "contrast.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"severities": (0, 1)}, "severities must be from 1 to 5; got 0, 1"),
        ({"severities": ()}, "severities must be"),
        ({"severities": (1.0,)}, "severities must be"),
        ({"workers": -1}, "workers must be at least 0; got -1"),
        ({"corruptions": ()}, "Choose at least one corruption"),
        ({"corruptions": ("fogg",)}, "did you mean fog"),
        ({"labels": Y[:3]}, "7 images needs a label; got uint8 of shape"),
        ({"labels": Y.astype(int) + 300}, "from 0 to 255"),
        ({"images": X[..., :1]}, "must be a NumPy array of uint8"),
        ({"seed": 2**32}, "seed must be"),
    ],
)
def test_wrong_arguments_create_no_folder(tmp_path, changes, message):
    arguments = {"images": X, "labels": Y, "folder": tmp_path / "c"} | changes
    with pytest.raises(ValueError, match=message):
        generate_set(**arguments)
    assert not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be used .*; give another folder"):
        generate_set(X, Y, tmp_path / "file" / "c", workers=1)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    def refused(path, data):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("featureflock.corruptions.files.write_atomically", refused)  # permissions do not stop root
    with pytest.raises(OSError, match=r"c cannot be used \(Permission denied\); give another folder"):
        generate_set(X, Y, tmp_path / "c", workers=1)


@pytest.mark.parametrize("fault", range(1, 19))
def test_a_fault_at_any_write_point_is_resumed(tmp_path, monkeypatch, fault):
    """Each of six files is written in three steps: fsync, replace, fsync of the folder."""
    options = {"corruptions": ["contrast", "pixelate"], "severities": (1,), "workers": 1, "log": no_messages}
    generate_set(X, Y, tmp_path / "expected", **options)
    calls = []

    def fail_at(function):
        def wrapped(*args):
            calls.append(function.__name__)
            if len(calls) == fault:
                raise KeyboardInterrupt
            return function(*args)

        return wrapped

    with monkeypatch.context() as patch:
        for step in ("fsync", "replace"):
            patch.setattr(f"featureflock.utils.files.os.{step}", fail_at(getattr(files.os, step)))
        with pytest.raises(KeyboardInterrupt):
            generate_set(X, Y, tmp_path / "c", **options)
    assert not list((tmp_path / "c").glob("*.partial"))
    generate_set(X, Y, tmp_path / "c", **options)
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes()
