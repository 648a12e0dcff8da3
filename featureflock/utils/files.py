"""Atomic writes: after a crash or power failure, a file has its old or its new content, never a part of it.

Files of unknown origin are read by `read_regular`, which neither blocks nor reads without end.
"""

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path

_PARTIAL = re.compile(r"\.featureflock-([0-9a-f]{8})-(\d+)-[0-9a-f]{32}\.partial")
"""Name of a temporary file or folder: machine and process that write it, and random digits."""
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


def open_regular(path: Path, advice: str = "") -> BufferedReader:
    """Open a regular file for reading; errors as in `read_regular`."""
    then = f"; {advice}." if advice else "."
    try:
        return open(path, "rb", opener=_open_regular)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing{then}") from None
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read; change its permissions.") from error
    except _NotRegularError:
        raise ValueError(f"{path} is not a regular file{then}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror or error}).") from error


def check_regular(path: Path, advice: str = "") -> None:
    """Raise the errors of `read_regular`, for files that another library opens."""
    open_regular(path, advice).close()


class _NotRegularError(OSError):
    """A pipe, device or socket, which could block or never end."""


def _open_regular(path: str, flags: int) -> int:
    _check_mode(os.stat(path).st_mode)  # before it is opened, which may have an effect on a device
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for a writer
    try:
        _check_mode(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_mode(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise _NotRegularError


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
    """Remove temporary files and folders of killed processes.

    A process of this machine is known to have ended. Of others, files that were not modified for `age` seconds are
    removed.
    """
    for path in folder.iterdir():
        match = _PARTIAL.fullmatch(path.name)
        if match and (_has_ended(match[1], int(match[2])) or time.time() - _last_modified(path) > age):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # another process may have removed it
                    path.unlink()


def _partial(folder: Path) -> Path:
    return folder / f".featureflock-{_machine()}-{os.getpid()}-{uuid.uuid4().hex}.partial"


@cache
def _machine() -> str:
    """Digest of what has one numbering of processes: a boot of a machine, and a PID namespace, as of a container."""
    names = [platform.node()]
    for read, path in ((Path.read_text, "/proc/sys/kernel/random/boot_id"), (os.readlink, "/proc/self/ns/pid")):
        with contextlib.suppress(OSError):  # not Linux
            names.append(str(read(Path(path))))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]


def _has_ended(machine: str, process: int) -> bool:
    """Whether a process is known to have ended."""
    if os.name != "posix" or machine != _machine():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user, or there is no such number
        return False
    return False


def _last_modified(path: Path) -> float:
    """Return the newest modification time in a folder; its own does not change while a file in it grows."""
    newest = 0.0
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, each.lstat().st_mtime)
    return newest
