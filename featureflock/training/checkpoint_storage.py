"""The format of a checkpoint: safetensors and JSON, so that no code in a checkpoint is executed.

A checkpoint is a folder:

    checkpoint.json      the progress of the run; file, shape, dtype and SHA-256 of each tensor; a digest of all this
    0.safetensors …      the tensors that each process wrote

It is written into a temporary folder, which is renamed when it is complete, so a checkpoint is complete or does not
exist.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from featureflock.utils.digests import json_digest, sha256
from featureflock.utils.files import check_regular, clear_partials, working_folder
from featureflock.utils.json_files import check_json, read_json

INDEX = "checkpoint.json"
_FORMAT, _VERSION = "featureflock checkpoint", 1
_FILE = re.compile(r"\d{1,9}\.safetensors")


class TensorEntry(TypedDict):
    """What the index knows of a tensor."""

    file: str
    dtype: str
    shape: list[int]
    sha256: str


class Index(TypedDict):
    """Content of checkpoint.json, without the digest of the index itself."""

    format: str
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_index(folder: Path) -> Index:
    """Read and verify the index of a checkpoint."""
    path = folder / INDEX
    value: dict[str, Any] = read_json(path, dict[str, Any])
    if (value.get("format"), value.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(f"{path} is not a checkpoint that this version of featureflock reads.")
    if value.pop("sha256", None) != json_digest(value):
        raise ValueError(f"{path} is damaged: its content has changed.")
    index: Index = check_json(value, str(path), Index)
    sizes = dict[str, int]()
    for name, entry in index["tensors"].items():
        known = isinstance(getattr(torch, entry["dtype"], None), torch.dtype) and all(k >= 0 for k in entry["shape"])
        if not known or not _FILE.fullmatch(entry["file"]):
            raise ValueError(f"{path} is damaged: it does not describe the tensor {name}.")
        size = math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
        sizes[entry["file"]] = sizes.get(entry["file"], 0) + size
    for file, size in sizes.items():
        if (folder / file).stat().st_size < size:  # before memory for the tensors is allocated
            raise ValueError(f"{folder / file} is truncated.")
    return index


def empty_tensor(entry: TensorEntry) -> Tensor:
    """A tensor of this shape, without values."""
    return torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU, none of which shares memory with another."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder for a new checkpoint, which is removed at the end, if it has not been renamed."""
    parent.mkdir(parents=True, exist_ok=True)
    clear_partials(parent, age=0)  # of killed processes; the run is locked, so no other process writes here
    with working_folder(parent) as folder:
        yield folder


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, TensorEntry]:
    """Write the tensors of a process to a file, and return their entries in the index."""
    if tensors:
        try:
            save_file(tensors, path)
        except safetensors.SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error
        _flush(path)
    return {
        name: TensorEntry(file=path.name, dtype=str(t.dtype).removeprefix("torch."), shape=[*t.shape], sha256=digest(t))
        for name, t in tensors.items()
    }


def write_index(folder: Path, metadata: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
    """Write checkpoint.json, the last file of a checkpoint."""
    index = Index(format=_FORMAT, version=_VERSION, metadata=metadata, tensors=tensors)
    path = folder / INDEX
    path.write_text(json.dumps({**index, "sha256": json_digest(index)}))
    _flush(path)


def read_tensors(folder: Path, index: Index, tensors: Mapping[str, Tensor]) -> None:
    """Read and verify these tensors, in place; the others are not read."""
    names_by_file: dict[str, list[str]] = {}
    for name in tensors:
        names_by_file.setdefault(index["tensors"][name]["file"], []).append(name)
    for file, names in names_by_file.items():
        check_regular(folder / file)
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                tensor, target = opened.get_tensor(name), tensors[name]
                if digest(tensor) != index["tensors"][name]["sha256"] or tensor.dtype != target.dtype:
                    raise ValueError(f"{name} in {folder / file} is damaged.")
                target.copy_(tensor.view(target.shape))


def digest(tensor: Tensor) -> str:
    """SHA-256 of the values of a contiguous tensor."""
    return sha256(tensor.reshape(-1).view(torch.uint8).numpy())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if folders can be opened (not on Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
