"""Atomic writes: after a crash or power failure, a file has its old or its new content, never a part of it."""

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

_PARTIAL = re.compile(r"\.featureflock-[0-9a-f]{32}\.partial")


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file so that a reader sees all of it or the previous one, also after an exception in `data`."""
    with atomic_path(path) as partial, open(partial, "xb") as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` at the end, or is removed after an exception."""
    partial = _partial(path.parent)
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # flush the rename to disk, if folders can be opened (not on Windows)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Create an output folder, or raise ValueError, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be created ({error.strerror}); choose another folder.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable; choose another folder.")


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary folder and remove it at the end; `clear_partials` removes it if the process is killed."""
    folder = _partial(parent)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_partials(folder: Path, age: float = 3600) -> None:
    """Remove temporary files and folders of killed processes: those that were not modified for `age` seconds."""
    for path in folder.iterdir():
        if _PARTIAL.fullmatch(path.name) and time.time() - _last_modified(path) > age:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # another process may have removed it
                    path.unlink()


def _partial(folder: Path) -> Path:
    return folder / f".featureflock-{uuid.uuid4().hex}.partial"


def _last_modified(path: Path) -> float:
    """Return the newest modification time in a folder; its own does not change while a file in it grows."""
    newest = 0.0
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, each.lstat().st_mtime)
    return newest
