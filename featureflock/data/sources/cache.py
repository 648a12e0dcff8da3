"""The cache: one safetensors file for each data set, whose digests are checked at every load.

Pictures lie in it as (N, H, W, C) bytes, for batched cropping gathers rows of pixels. They are given out as
(N, C, H, W) with those same strides: PyTorch's channels_last.
"""

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from featureflock.data.sources.archives import Raw
from featureflock.data.sources.registry import known
from featureflock.utils.files import write_atomically

VARIABLE = "FEATUREFLOCK_CACHE"
"""The environment variable that moves the cache."""
_FORMAT = "featureflock data"
_VERSION = 1
_ARRAYS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class CachedArrays:
    """A data set in memory: pictures uint8 (N, C, H, W), channels_last, and labels int64 (N,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    published: bool
    """False for a collection of one's own in the same format."""
    source: str
    """Where it came from, in words."""
    digest: str
    """SHA-256 of the contents: equal for equal pictures and labels, whatever the source."""


@dataclass(frozen=True)
class CacheEntry:
    """What the cache says that it holds, without reading the pictures."""

    train: int
    test: int
    size: int
    published: bool
    source: str


def cache_folder() -> Path:
    """$FEATUREFLOCK_CACHE, else the platform's folder for caches; it need not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ValueError(f"This user has no home folder; set {VARIABLE} to a folder for data sets.") from error
    system = platform.system()
    if system == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "featureflock"
    if system == "Darwin":
        return home / "Library" / "Caches" / "featureflock"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else home / ".cache") / "featureflock"


def path_of(name: str) -> Path:
    return cache_folder() / f"{name}.safetensors"


def store(name: str, raw: Raw, *, source: str, published: bool) -> Path:
    """Put a data set into the cache, atomically, in place of what is there."""
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": name,
        "source": source,
        "published": published,
        "arrays": {key: {"shape": list(raw[key].shape), "sha256": sha256(raw[key])} for key in _ARRAYS},
    }
    text = json.dumps(index, sort_keys=True)
    metadata = {"featureflock": text, "sha256": sha256(text.encode())}
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, safetensors.numpy.save({key: raw[key] for key in _ARRAYS}, metadata))
    return path


def load(name: str) -> CachedArrays:
    """A data set from the cache, checked against its digests."""
    facts, path = known(name), path_of(name)
    index, tensors = _read(name, list(_ARRAYS))
    for key, tensor in tensors.items():
        digest = sha256(tensor.numpy())
        stored = {"shape": list(tensor.shape), "sha256": digest}
        pinned = facts.sha256 if index["published"] else None
        if tensor.dtype != torch.uint8 or stored != index["arrays"][key]:
            raise _damaged(name, path)
        if pinned is not None and digest != pinned[key]:
            raise _damaged(name, path)
    return CachedArrays(
        train_x=tensors["train_x"].permute(0, 3, 1, 2),
        train_y=tensors["train_y"].long(),
        test_x=tensors["test_x"].permute(0, 3, 1, 2),
        test_y=tensors["test_y"].long(),
        published=index["published"],
        source=index["source"],
        digest=sha256(json.dumps(index["arrays"], sort_keys=True).encode()),
    )


def look_up(name: str) -> CacheEntry | None:
    """What the cache holds of a data set, by its header alone; None if it is not here."""
    try:
        index, _ = _read(name, [])
        size = path_of(name).stat().st_size
    except FileNotFoundError:
        return None
    train, test = (index["arrays"][key]["shape"][0] for key in ("train_y", "test_y"))
    return CacheEntry(train, test, size, index["published"], index["source"])


def _read(name: str, keys: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, path = known(name), path_of(name)
    if not path.is_file():
        raise FileNotFoundError(f"{facts.title} is not here yet; run: featureflock data get {name}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata["featureflock"]
            index = json.loads(text)
            sound = index["format"] == _FORMAT and metadata["sha256"] == sha256(text.encode())
            if not sound or index["name"] != name:
                raise _damaged(name, path)
            if index["version"] != _VERSION:
                raise ValueError(
                    f"{path} has format {index['version']} and this version of featureflock reads {_VERSION}; "
                    f"run: featureflock data get {name}"
                )
            # Copies, so that the file is not held open: Windows could not replace it.
            return index, {key: file.get_tensor(key).clone() for key in keys}
    except (safetensors.SafetensorError, json.JSONDecodeError, LookupError, TypeError) as error:
        raise _damaged(name, path) from error


def _damaged(name: str, path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: it has not the content that was stored; run: featureflock data get {name}")


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
