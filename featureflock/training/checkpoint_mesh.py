"""Checkpoints of a mesh, coordinated by torch.distributed.checkpoint, in the format of checkpoint_storage.py.

All processes write into one temporary folder. Rank 0 renames it when all of them have finished. A tensor that several
processes have is written by one of them. A process reads, and verifies, only the tensors that it asks for.

The import takes half a second, so a single process does without it.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from featureflock.training.checkpoint_storage import (
    Index,
    TensorEntry,
    copied,
    read_tensors,
    temporary_folder,
    write_index,
    write_tensors,
)

T = TypeVar("T")


class PendingCheckpoint:
    """A checkpoint that all processes of a group are writing in the background, from copies of their tensors."""

    def __init__(
        self,
        parent: Path,
        tensors: dict[str, Tensor],
        metadata: dict[str, Any],
        commit: Callable[[Path], None],
        group: dist.ProcessGroup,
    ) -> None:
        self._writer = _Writer(parent, metadata, commit)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        saving = async_save(tensors, storage_writer=self._writer, planner=planner, process_group=group)
        self._future = cast("Future[Metadata]", saving)

    def result(self) -> None:
        """Wait until the checkpoint is complete; raise the error of any process that has failed."""
        with self._writer.stack:
            try:
                self._future.result()
            except CheckpointException as error:
                raise _first_failure(error) from None


def read_by_all(folder: Path, index: Index, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Read tensors in place; all processes raise the error of the first one that fails."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(tensors, storage_reader=_Reader(folder, index), planner=planner, process_group=group)
    except CheckpointException as error:
        raise _first_failure(error) from None


def _first_failure(error: CheckpointException) -> BaseException:
    """The error of the first process that failed."""
    return error.failures[min(error.failures)][0]


class _Writer(StorageWriter):
    """Writes one checkpoint. `commit` moves the complete temporary folder to its name, on rank 0."""

    def __init__(self, parent: Path, metadata: dict[str, Any], commit: Callable[[Path], None]) -> None:
        self.parent, self.metadata, self.commit = parent, metadata, commit
        self.stack = ExitStack()
        """Removes the temporary folder, if there is one."""

    # Copies of the tensors, so that training may go on while they are written.

    should_synchronize_after_execute = _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return copied(state_dict)

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass

    # The interface of StorageWriter, in the order of the calls.

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._partial = self.stack.enter_context(temporary_folder(self.parent))
        paths = [str(self._partial / f"{rank}.safetensors") for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=path) for plan, path in zip(plans, paths, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        entries = write_tensors(Path(plan.storage_data), tensors)
        results = [(item.index, tensors[item.index.fqn].nbytes, entries[item.index.fqn]) for item in plan.items]
        return _completed([WriteResult(*result) for result in results])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors = {result.index.fqn: cast(TensorEntry, result.storage_data) for each in results for result in each}
        write_index(self._partial, self.metadata, tensors)
        self.commit(self._partial)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Reader(StorageReader):
    """Reads tensors of one checkpoint, whose index has been read before."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _tensor_metadata(entry) for name, entry in self.index["tensors"].items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        targets = {item.storage_index.fqn: planner.resolve_tensor(item).detach() for item in plan.items}
        read_tensors(self.folder, self.index, targets)
        for item in plan.items:
            planner.commit_tensor(item, targets[item.storage_index.fqn])
        return _completed(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    shape = torch.Size(entry["shape"])
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, entry["dtype"])), shape, [chunk])


def _completed(value: T) -> torch.futures.Future[T]:
    future: torch.futures.Future[T] = torch.futures.Future()
    future.set_result(value)
    return future
