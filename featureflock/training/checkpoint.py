"""Checkpoints of a training run: one safetensors file each, written atomically; the last two are stored.

A file holds every tensor that the rest of the run depends on, and its metadata the progress of the run and a digest of
the content. A damaged checkpoint, also one without content, is renamed and reported, and the previous one is used.
Random states need not be stored: the random numbers of a step are a function of the seed and the step.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import safetensors
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from featureflock.data import content_digest
from featureflock.training.run_folder import History
from featureflock.utils.files import atomic_path, check_regular, clear_partials
from featureflock.utils.json_files import parse_json


class Metadata(TypedDict):
    """The identity of a run, and its progress: the fields of `TrainingState`."""

    recipe: dict[str, Any]
    data: str
    """Digest of the training data."""
    test_data: NotRequired[dict[str, str]]
    """Digests of the test and the validation data."""
    compute: dict[str, Any]
    history: NotRequired[History]
    """Digests of the files to which the run adds."""
    epoch: int
    batch: int
    step: int
    seconds: float
    unreadable: list[str]


@dataclass(frozen=True)
class Checkpoint:
    """Tensors and metadata of a run after one of its steps."""

    tensors: dict[str, Tensor]
    metadata: Metadata


def write(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a step, then remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _separate({name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()})
    text = json.dumps(checkpoint.metadata)
    header = {"metadata": text, "sha256": _digest(tensors, text)}
    with atomic_path(folder / f"checkpoint-{step:09d}.safetensors") as path:
        try:
            save_file(tensors, path, header)
        except safetensors.SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error
    clear_partials(folder, age=0)  # the run is locked: no other process writes here
    for old in _paths(folder)[:-2]:
        old.unlink(missing_ok=True)


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, if any, and messages about damaged ones, which are renamed."""
    messages: list[str] = []
    for path in reversed(_paths(folder)):
        check_regular(path)
        try:
            checkpoint = _read(path)
        except (OSError, MemoryError):
            raise
        except Exception:  # of readers, which raise many kinds of errors
            path.rename(path.with_suffix(".damaged"))
            messages.append(f"{path} is damaged and was renamed; using the previous checkpoint.")
        else:
            return checkpoint, messages
    if any(folder.glob("*.damaged")):
        raise ValueError(f"All checkpoints in {folder} are damaged; start again in another folder.")
    return None, []


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with a later one, such as tied weights, which safetensors refuses."""
    originals = set({tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}.values())
    return {name: tensor if name in originals else tensor.clone() for name, tensor in tensors.items()}


def _digest(tensors: dict[str, Tensor], metadata: str) -> str:
    content = content_digest(*(tensors[name] for name in sorted(tensors)))
    return hashlib.sha256((metadata + json.dumps(sorted(tensors)) + content).encode()).hexdigest()


def _read(path: Path) -> Checkpoint:
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is no mapping
    if header["sha256"] != _digest(tensors, header["metadata"]):
        raise ValueError(f"{path} is damaged.")
    metadata: Metadata = parse_json(header["metadata"], str(path), Metadata)
    if not tensors:
        raise ValueError(f"{path} has no tensors.")
    return Checkpoint(tensors, metadata)
