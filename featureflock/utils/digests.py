"""SHA-256 digests of files. The digest of a file is computed once per process, and again when the file changes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DIGESTS: dict[tuple[str, ...], str] = {}
"""Digests by kind, path, device, inode, size and times of the file."""


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file."""

    def compute() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return once_per_version(path, "bytes", compute)


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def once_per_version(path: Path, kind: str, compute: Callable[[], str]) -> str:
    """Return `compute()`, a digest of the content of a file, called once as long as the file does not change.

    `kind` tells different digests of one file apart.
    """
    status = path.stat()
    numbers = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    version = kind, os.path.abspath(path), *map(str, numbers)
    if version not in _DIGESTS:
        _DIGESTS[version] = compute()
    return _DIGESTS[version]
