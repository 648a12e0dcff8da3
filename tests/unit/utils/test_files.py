"""Atomic writes, with a fault at every step, and the removal of temporary files."""

import os
import time

import pytest

from featureflock.utils import files
from featureflock.utils.files import atomic_path, check_folder, clear_partials, working_folder, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writes_bytes_and_chunks(tmp_path):
    write_atomically(tmp_path / "a", b"whole")
    write_atomically(tmp_path / "b", (chunk for chunk in (b"in ", b"chunks")))
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert (tmp_path / "b").read_bytes() == b"in chunks"
    assert names(tmp_path) == ["a", "b"]


def test_the_content_is_flushed_to_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_atomically(tmp_path / "a", b"x")
    assert calls == ["fsync", "replace", "fsync"]  # the file, the rename, the folder


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_fault_leaves_the_old_content(tmp_path, monkeypatch, step):
    (tmp_path / "a").write_bytes(b"old")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files if step == "open" else os, step, fail, raising=False)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_an_exception_in_the_data_leaves_the_old_content(tmp_path):
    def chunks():
        yield b"new"
        raise ValueError("failed check")

    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(ValueError, match="failed check"):
        write_atomically(tmp_path / "a", chunks())
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "a") as path:
        path.write_bytes(b"new"[: 1 // 0])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_system_without_folder_fsync(tmp_path, monkeypatch):
    """Windows cannot open folders."""

    def fail(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", fail)
    (tmp_path / "b").write_text("new")
    with atomic_path(tmp_path / "a") as path:
        os.replace(tmp_path / "b", path)
    assert (tmp_path / "a").read_text() == "new"


def test_working_folder_is_removed(tmp_path):
    with working_folder(tmp_path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert names(tmp_path) == []
    with pytest.raises(RuntimeError), working_folder(tmp_path):
        raise RuntimeError
    assert names(tmp_path) == []


def test_only_old_temporary_files_are_cleared(tmp_path):
    old_file, new_file, old_folder, growing = (tmp_path / f".featureflock-{c * 32}.partial" for c in "0123")
    for path in (old_file, new_file):
        path.write_text("x")
    for folder in (old_folder, growing):
        folder.mkdir()
        (folder / "file").write_text("x")
    (tmp_path / ".other.partial").write_text("x")
    past = time.time() - 7200
    for path in (old_file, old_folder / "file", old_folder, growing, tmp_path / ".other.partial"):
        os.utime(path, (past, past))
    clear_partials(tmp_path)
    assert names(tmp_path) == sorted([new_file.name, growing.name, ".other.partial"])
    clear_partials(tmp_path, age=-1)
    assert names(tmp_path) == [".other.partial"]


def test_output_folders_are_created_or_refused(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be created"):
        check_folder(tmp_path / "file" / "below")


def test_an_output_folder_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="is not writable"):
        check_folder(tmp_path)
