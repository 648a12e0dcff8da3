"""SHA-256 digests of files. The digest of a file is computed once per process, and again when the file changes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featureflock.utils.files import open_regular

_DIGESTS: dict[tuple[str, ...], str] = {}


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file."""

    def compute() -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return once_per_version(path, "bytes", compute)


def sha256(data: Any) -> str:
    """SHA-256 of bytes or of a contiguous array."""
    return hashlib.sha256(data).hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return sha256(json.dumps(value, sort_keys=True).encode())


def once_per_version(path: Path, kind: str, compute: Callable[[], str]) -> str:
    """Return `compute()`, a digest of the content of a file, called once as long as the file does not change.

    `kind` tells different digests of one file apart.
    """
    return once((kind, os.path.abspath(path), file_version(path.stat())), compute)


def once(key: tuple[str, ...], compute: Callable[[], str]) -> str:
    """Return `compute()`, called once per process and key."""
    if key not in _DIGESTS:
        _DIGESTS[key] = compute()
    return _DIGESTS[key]


def file_version(status: os.stat_result) -> str:
    """Device, inode, size and times of a file, which change with its content."""
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
