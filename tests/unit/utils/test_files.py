"""Atomic writes, and the removal of what killed processes left."""

import os

import pytest
from helpers.published_formats import make_old

from featureflock.utils import files


def test_a_failed_write_leaves_the_previous_file(tmp_path):
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


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_fault_at_any_write_point_leaves_the_previous_file(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    files.write_atomically(path, b"first")

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, step, fail)
        with pytest.raises(KeyboardInterrupt):
            files.write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_only_old_partial_files_are_removed(tmp_path):
    with files.working_folder(tmp_path) as old, files.working_folder(tmp_path) as growing:
        for folder in (old, growing):
            (folder / "inner").mkdir()
            (folder / "inner" / "data").write_bytes(b"x")
            make_old(folder)
        os.utime(growing / "inner" / "data")  # the folder itself looks old
        (tmp_path / "user.partial").write_bytes(b"x")
        os.utime(tmp_path / "user.partial", (1e9, 1e9))
        files.clear_partials(tmp_path)
        assert not old.exists()
        assert (growing / "inner" / "data").exists()
        assert (tmp_path / "user.partial").exists()  # not written by featureflock
    assert [path.name for path in tmp_path.iterdir()] == ["user.partial"]
