"""Atomic writes, with a fault at every step, and the removal of temporary files."""

import os
import socket
import subprocess
import sys
import time

import pytest

from featureflock.utils import files
from featureflock.utils.files import (
    atomic_path,
    check_folder,
    check_regular,
    clear_partials,
    open_regular,
    read_regular,
    working_folder,
    write_atomically,
)


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


def test_temporary_files_of_other_machines_are_cleared_when_they_are_old(tmp_path):
    old_file, new_file, old_folder, growing = (tmp_path / f".featureflock-{'0' * 8}-1-{c * 32}.partial" for c in "0123")
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


def test_temporary_files_of_ended_processes_are_cleared_at_once(tmp_path):
    """Those of a running process stay, however many there are of it."""
    code = f"""
from pathlib import Path
from featureflock.utils.files import working_folder
context = working_folder(Path({str(tmp_path)!r}))
context.__enter__()
"""
    subprocess.run([sys.executable, "-c", code + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    (left,) = tmp_path.iterdir()
    with working_folder(tmp_path) as mine:
        assert left.exists()
        clear_partials(tmp_path)
        assert names(tmp_path) == [mine.name]


def test_only_regular_files_are_opened(tmp_path):
    """A pipe blocks, /dev/zero never ends, and a socket cannot be opened; links to them are no better."""
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "to-pipe").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "socket", "zero", "to-pipe"):
        for function in (open_regular, read_regular, check_regular):
            with pytest.raises(ValueError, match=f"/{name} is not a regular file; train again\\.$"):
                function(tmp_path / name, "train again")
    server.close()
    with pytest.raises(OSError, match=r"cannot be read \(Is a directory\)\.$"):
        open_regular(tmp_path, "train again")
    with pytest.raises(FileNotFoundError, match=r"missing is missing; train again\.$"):
        open_regular(tmp_path / "missing", "train again")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "link") == b"content"


def test_files_larger_than_expected_are_not_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"sparse is damaged: it has more than 1,000 bytes\."):
        read_regular(tmp_path / "sparse", max_bytes=1000)
    with pytest.raises(ValueError, match="it has more than"):
        read_regular(tmp_path / "sparse")


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
