"""The cache: one safetensors file for each data set, verified by SHA-256 once per process and whenever it changes.

Images are stored as (N, H, W, C) bytes and returned as (N, C, H, W) with the same strides, PyTorch's channels_last,
because batched cropping gathers whole pixels.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from featureflock.data.sources.archives import Arrays
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.utils.digests import json_digest, once_per_version, sha256
from featureflock.utils.files import check_regular, write_atomically
from featureflock.utils.json_files import parse_json

VARIABLE = "FEATUREFLOCK_CACHE"  # environment variable with the cache folder
_FORMAT, _VERSION = "featureflock data", 1
_ARRAYS = ("train_x", "train_y", "test_x", "test_y")


class _Header(TypedDict):
    format: str
    version: int
    name: str


class _ArrayEntry(TypedDict):
    shape: list[int]
    sha256: str


class _Index(_Header):
    source: str
    published: bool
    arrays: dict[str, _ArrayEntry]


@dataclass(frozen=True)
class CachedArrays:
    """A data set in memory: images uint8 (N, C, H, W), channels_last, labels int64 (N,), and the digest of both."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    published: bool
    """False for a custom version in the same format."""
    source: str
    digest: str


@dataclass(frozen=True)
class CacheEntry:
    """Header of a cached data set."""

    train: int
    test: int
    size: int
    published: bool
    source: str


def cache_folder() -> Path:
    """Return $FEATUREFLOCK_CACHE, or the platform's cache folder; it may not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    import pooch  # takes 20 ms

    return Path(pooch.os_cache("featureflock")).expanduser()


def path_of(name: str) -> Path:
    """Return the cache file of a data set."""
    return cache_folder() / f"{name}.safetensors"


def store(name: str, arrays: Arrays, *, source: str, published: bool) -> Path:
    """Write a data set to the cache, atomically, and return its file."""
    stored = {key: {"shape": list(arrays[key].shape), "sha256": sha256(arrays[key])} for key in _ARRAYS}
    header = {"format": _FORMAT, "version": _VERSION, "name": name, "source": source, "published": published}
    text = json.dumps({**header, "arrays": stored}, sort_keys=True)
    metadata = {"featureflock": text, "sha256": sha256(text.encode())}
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, safetensors.numpy.save({key: arrays[key] for key in _ARRAYS}, metadata))
    return path


def load(name: str) -> CachedArrays:
    """Load a data set from the cache and verify its digests."""
    published = PUBLISHED_SETS[name]
    index, tensors = _read(name, _ARRAYS)

    def verify() -> str:
        for key, tensor in tensors.items():
            entry = index["arrays"][key]
            if (tensor.dtype, list(tensor.shape)) != (torch.uint8, entry["shape"]):
                raise _damaged(name)
            if sha256(tensor.numpy()) != entry["sha256"]:
                raise _damaged(name)
        digests = {key: index["arrays"][key]["sha256"] for key in _ARRAYS}
        official = not index["published"] or published.sha256 is None or digests == dict(published.sha256)
        if not official and published.differing({key: tensor.numpy() for key, tensor in tensors.items()}):
            raise _damaged(name)
        return json_digest(index["arrays"])

    digest = once_per_version(path_of(name), name, verify)
    arrays = {key: x.permute(0, 3, 1, 2) if x.ndim == 4 else x.long() for key, x in tensors.items()}
    return CachedArrays(**arrays, published=index["published"], source=index["source"], digest=digest)


def look_up(name: str) -> CacheEntry | None:
    """Return the header of a cached data set; None if it is not cached."""
    try:
        index, _ = _read(name, ())
        size = path_of(name).stat().st_size
    except FileNotFoundError:
        return None
    train, test = (index["arrays"][key]["shape"][0] for key in ("train_y", "test_y"))
    return CacheEntry(train, test, size, index["published"], index["source"])


def _read(name: str, keys: tuple[str, ...]) -> tuple[_Index, dict[str, Tensor]]:
    path = path_of(name)
    if not path.is_file():
        raise FileNotFoundError(f"{PUBLISHED_SETS[name].title} is not in the cache; run: featureflock data get {name}")
    check_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text, advice = metadata["featureflock"], f"run: featureflock data get {name}"
            if metadata["sha256"] != sha256(text.encode()):
                raise _damaged(name)
            header: _Header = parse_json(text, str(path), _Header, advice)
            if (header["format"], header["name"]) != (_FORMAT, name):
                raise _damaged(name)
            if (version := header["version"]) != _VERSION:
                raise ValueError(f"{path} has format version {version}, not {_VERSION}; {advice}")
            index: _Index = parse_json(text, str(path), _Index, advice)
            if index["arrays"].keys() != {*_ARRAYS}:
                raise _damaged(name)
            # Copies, because Windows cannot replace a file that is mapped.
            return index, {key: file.get_tensor(key).clone() for key in keys}
    except (safetensors.SafetensorError, LookupError) as error:
        raise _damaged(name) from error


def _damaged(name: str) -> ValueError:
    return ValueError(f"{path_of(name)} is damaged: its content has changed; run: featureflock data get {name}")
