"""Folders that no other user of the machine can write to, for files whose content is executed."""

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path


def check_private(folder: Path) -> None:
    """Create a folder with mode 0700 if it does not exist; OSError unless it belongs to this user alone.

    Folders above it must belong to this user or to root, and must not let everybody rename what is in them. Of a folder
    that others could read, the mode is changed. One that others could write to may have their files, and is refused.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = folder.parent.resolve()
    (parent / folder.name).mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "getuid"):  # Windows has no modes; a user's folders are private there
        return
    for above in (parent, *parent.parents):
        status = above.stat()
        open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or open_to_all:
            raise OSError(f"{folder} is not private: other users can replace what is in {above}")
    status = (parent / folder.name).lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{folder} is not private: it is a link, not a folder")
    if status.st_uid != os.getuid():
        raise OSError(f"{folder} is not private: it belongs to another user")
    if status.st_mode & 0o022:
        raise OSError(f"{folder} is not private: other users can write to it")
    if status.st_mode & 0o077:
        (parent / folder.name).chmod(0o700)


@cache
def temporary_private_folder() -> Path:
    """A new folder with mode 0700 and a random name, one for this process, removed when it exits."""
    folder = tempfile.mkdtemp(prefix="featureflock-")
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
