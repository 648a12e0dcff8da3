"""Atomic writes: after a crash or power failure, a file has its old or its new content, never a part of it.

Files of unknown origin are read by `read_regular`, which neither blocks nor reads without end.
"""

import contextlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

_PARTIAL = re.compile(r"\.featureflock-[0-9a-f]{32}\.partial")

MAX_BYTES = 256 * 2**20
"""Largest file that is read into memory as a whole, unless a reader gives another limit."""


def read_regular(path: Path, advice: str = "", max_bytes: int | None = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Pipes and devices, and files of more than `max_bytes`, are refused.

    The messages of OSError and ValueError name the file; `advice` says what to do if it is missing or damaged.
    """
    with open_regular(path, advice) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            then = f"; {advice}" if advice else ""
            raise ValueError(f"{path} is damaged: it has more than {max_bytes:,} bytes{then}.")
        return file.read()


@contextlib.contextmanager
def open_regular(path: Path, advice: str = "") -> Iterator[BufferedReader]:
    """Open a regular file for reading; errors as in `read_regular`."""
    then = f"; {advice}." if advice else "."
    try:
        with open(path, "rb", opener=_open_without_blocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path} is not a regular file{then}")
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing{then}") from None
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read; change its permissions.") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror or error}).") from error


def check_regular(path: Path, advice: str = "") -> None:
    """Raise the errors of `read_regular`, for files that another library opens."""
    with open_regular(path, advice):
        pass


def _open_without_blocking(path: str, flags: int) -> int:
    """Open a file; opening a pipe would wait for a writer otherwise."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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
    """Create the output folder of a command, or raise ValueError, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; choose a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be created ({error.strerror}); choose another folder.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder} is not writable; choose another folder.")


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
