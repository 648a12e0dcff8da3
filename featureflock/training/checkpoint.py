"""Checkpoints: one safetensors file each, whole or not at all, with a digest of its content; the last two are kept.

The file holds every tensor that the rest of the run depends on, and in its header the facts that say where it stands.
Random numbers need no keeping: each step's are a function of the seed and the step.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import safe_open
from torch import Tensor

from featureflock.data import content_digest
from featureflock.utils.files import clear_partials, write_atomically

_NAME = re.compile(r"checkpoint-(\d{9})\.safetensors")
_FORMAT = 1
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Checkpoint:
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """JSON: where the run stands, and what run it is."""


def write(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a step, then remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    facts = json.dumps(checkpoint.facts)
    digest = _digest(tensors, facts)
    write_atomically(folder / f"checkpoint-{step:09d}.safetensors", _serialised(tensors, facts, digest))
    clear_partials(folder, age=0)  # the run is locked: nobody else is writing here
    for path in _all(folder)[:-2]:
        path.unlink(missing_ok=True)


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, or None if there is none at all, and what has to be said of damaged ones.

    A damaged file is renamed, so that it is never taken for one of the last two.
    """
    paths = _all(folder) if folder.is_dir() else []
    notes: list[str] = []
    for path in reversed(paths):
        try:
            checkpoint = _read(path)
        except (ValueError, LookupError, safetensors.SafetensorError):
            path.rename(path.with_suffix(".damaged"))
            notes.append(f"{path} is damaged and was set aside; the checkpoint before it is used.")
        else:
            return checkpoint, notes
    if folder.is_dir() and any(folder.glob("*.damaged")):
        raise ValueError(f"No checkpoint in {folder} is sound; start again in another folder.")
    return None, []


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    names = sorted(tensors)
    content = content_digest(*(tensors[name] for name in names))
    return hashlib.sha256((facts + json.dumps(names) + content).encode()).hexdigest()


def _serialised(tensors: dict[str, Tensor], facts: str, digest: str) -> Iterator[bytes]:
    """The safetensors format, piece by piece, so that no second copy of everything is made."""
    header: dict[str, Any] = {"__metadata__": {"format": str(_FORMAT), "facts": facts, "sha256": digest}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield tensor.reshape(-1).view(torch.uint8).numpy().data  # type: ignore[misc]


def _read(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is no mapping
    if metadata["format"] != str(_FORMAT):
        raise ValueError(f"{path} has another format.")
    if metadata["sha256"] != _digest(tensors, metadata["facts"]):
        raise ValueError(f"{path} is damaged.")
    return Checkpoint(tensors, json.loads(metadata["facts"]))
