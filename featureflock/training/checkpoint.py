"""Checkpoints of a training run, written and read by all processes of a mesh; the last two are stored.

    with CheckpointWriter(folder, mesh) as writer:
        writer.write(step, checkpoint)                       # in the background, one at a time
    checkpoint, messages = read_newest(folder, mesh, wanted)

A checkpoint holds every tensor that the rest of the run depends on, and the progress of the run. Each process writes
the tensors of its own members and reads only those that it wants, whatever the mesh that has written them
(checkpoint_storage.py). A damaged checkpoint is renamed and reported, and the previous one is used. Random states need
not be stored: the random numbers of a step are a function of the seed and the step.
"""

import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, Protocol, Self, TypedDict, cast

import torch
from torch import Tensor

from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh
from featureflock.training.checkpoint_storage import (
    INDEX,
    Index,
    copied,
    empty_tensor,
    read_index,
    read_tensors,
    sync_folder,
    temporary_folder,
    write_index,
    write_tensors,
)
from featureflock.training.run_folder import History
from featureflock.utils.files import check_regular, working_folder
from featureflock.utils.json_files import check_json

_NAME = re.compile(r"checkpoint-\d{9,}")


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
    """Tensors and metadata of a run after one of its steps: in a mesh, the tensors of this process."""

    tensors: dict[str, Tensor]
    metadata: Metadata


class _Pending(Protocol):
    """A checkpoint that is being written in the background."""

    def result(self) -> object:
        """Wait until it is complete; raise the error if it has failed."""


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, one at a time. The context ends when the last is written."""

    def __init__(self, folder: Path, mesh: Mesh = SINGLE_PROCESS) -> None:
        self.folder, self.group = folder, mesh.storage_group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None

    def write(self, step: int, checkpoint: Checkpoint) -> None:
        """Copy the tensors of this process, and start to write the checkpoint of a step; all processes call this."""
        self.wait()
        metadata = cast(dict[str, Any], checkpoint.metadata)

        def commit(complete: Path) -> None:
            final = self.folder / f"checkpoint-{step:09d}"
            with working_folder(self.folder) as aside:
                if final.exists():
                    os.replace(final, aside / final.name)
                sync_folder(complete)
                os.replace(complete, final)
                sync_folder(self.folder)
                for old in checkpoint_paths(self.folder)[:-2]:
                    os.replace(old, aside / old.name)

        def write_alone(tensors: dict[str, Tensor]) -> None:
            with temporary_folder(self.folder) as partial:
                write_index(partial, metadata, write_tensors(partial / "0.safetensors", tensors))
                commit(partial)

        if self.group is None:
            self._pending = self._thread.submit(write_alone, copied(checkpoint.tensors))
        else:
            from featureflock.training.checkpoint_mesh import PendingCheckpoint

            self._pending = PendingCheckpoint(self.folder, checkpoint.tensors, metadata, commit, self.group)

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise the error of any process that has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._thread, contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.wait()


def write(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in a single process, and wait for it."""
    with CheckpointWriter(folder) as writer:
        writer.write(step, checkpoint)


def read_newest(
    folder: Path, mesh: Mesh = SINGLE_PROCESS, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, if any, and messages about damaged ones, which are renamed.

    All processes call this, and each gets the tensors whose names it wants. A checkpoint is damaged if it is for any of
    them.
    """
    messages: list[str] = []
    while (found := mesh.on_rank_zero(lambda: _newest_index(folder))) is not None:
        path, index = found
        checkpoint = None if index is None else _read(path, index, mesh, wanted)
        if checkpoint is not None:
            return checkpoint, messages
        mesh.on_rank_zero(lambda path=path: path.rename(_free_name(path.with_suffix(".damaged"))))  # type: ignore[misc]
        messages.append(f"{path} is damaged and was renamed; using the previous checkpoint.")
    if mesh.on_rank_zero(lambda: any(folder.glob("*.damaged*"))):
        raise ValueError(f"All checkpoints in {folder} are damaged; start again in another folder.")
    return None, []


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def _newest_index(folder: Path) -> tuple[Path, Index | None] | None:
    """Path and index of the newest checkpoint; without the index if it is damaged."""
    paths = checkpoint_paths(folder)
    if not paths:
        return None
    path = paths[-1]
    try:
        check_regular(path / INDEX)
    except FileNotFoundError:
        return path, None
    try:
        index = read_index(path)
        check_json(index["metadata"], str(path), Metadata)
    except FileNotFoundError:
        return path, None
    except (OSError, MemoryError):
        raise
    except Exception:  # of readers, which raise many kinds of errors
        return path, None
    return path, index if index["tensors"] else None


def _read(path: Path, index: Index, mesh: Mesh, wanted: Callable[[str], bool]) -> Checkpoint | None:
    """This process's part of a checkpoint; None if the part of any process is damaged."""
    if int(mesh.world.max(torch.tensor(int(not path.is_dir())))):
        text = f"{path.parent.parent} must be a folder that all hosts share"
        raise ValueError(f"{text}; not every host sees its checkpoint.")
    tensors = {name: empty_tensor(entry) for name, entry in index["tensors"].items() if wanted(name)}
    try:
        if mesh.storage_group is None:
            read_tensors(path, index, tensors)
        else:
            from featureflock.training.checkpoint_mesh import read_by_all

            read_by_all(path, index, tensors, mesh.storage_group)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception:  # of readers, which raise many kinds of errors
        return None
    return Checkpoint(tensors, cast(Metadata, index["metadata"]))


def _free_name(path: Path) -> Path:
    """This path, or with a number if it exists."""
    names = (path if k == 0 else path.with_name(f"{path.name}-{k}") for k in range(1000))
    return next(each for each in names if not each.exists())
