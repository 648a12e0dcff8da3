"""Storage of torch.distributed.checkpoint in safetensors and JSON, so that no code in a checkpoint is executed.

A checkpoint is a folder:

    checkpoint.json      the progress of the run; file, shape, dtype and SHA-256 of each tensor; a digest of all this
    0.safetensors …      the tensors that each process wrote

All processes write into a temporary folder. Rank 0 renames it when all of them have finished, so a checkpoint is
complete or does not exist. A tensor that several processes have is written by one of them. A process that reads a
checkpoint reads, and verifies, only the tensors that it asks for.
"""

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from featureflock.utils.digests import json_digest, sha256
from featureflock.utils.files import check_regular, clear_partials, working_folder
from featureflock.utils.json_files import check_json, read_json

# A single process needs no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

T = TypeVar("T")

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


class Writer(StorageWriter):
    """Writes one checkpoint. `commit` moves the complete temporary folder to its name, on rank 0."""

    def __init__(self, parent: Path, metadata: dict[str, Any], commit: Callable[[Path], None]) -> None:
        self.parent, self.metadata, self.commit = parent, metadata, commit
        self._stack = ExitStack()

    # Copies of the tensors, so that training may go on while they are written.

    should_synchronize_after_execute = _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return {name: _copy(tensor) for name, tensor in state_dict.items()}

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        """Remove the temporary folder, if there is one."""
        self._stack.close()

    # The interface of StorageWriter, in the order of the calls.

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.parent.mkdir(parents=True, exist_ok=True)
        clear_partials(self.parent, age=0)  # of killed processes; the run is locked, so no other process writes here
        self._partial = self._stack.enter_context(working_folder(self.parent))
        paths = [str(self._partial / f"{rank}.safetensors") for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=path) for plan, path in zip(plans, paths, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path = Path(plan.storage_data)
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        if tensors:
            try:
                save_file(tensors, path)
            except safetensors.SafetensorError as error:  # such as a full disk
                raise OSError(str(error)) from error
            _flush(path)
        results = []
        for item in plan.items:
            tensor = tensors[item.index.fqn]
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = TensorEntry(file=path.name, dtype=dtype, shape=[*tensor.shape], sha256=digest(tensor))
            results.append(WriteResult(item.index, tensor.nbytes, entry))
        return _completed(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors = {result.index.fqn: result.storage_data for each in results for result in each}
        index = Index(format=_FORMAT, version=_VERSION, metadata=self.metadata, tensors=tensors)
        path = self._partial / INDEX
        path.write_text(json.dumps({**index, "sha256": json_digest(index)}))
        _flush(path)
        self.commit(self._partial)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class Reader(StorageReader):
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.index["tensors"][item.storage_index.fqn]["file"], []).append(item)
        for file, items in by_file.items():
            check_regular(self.folder / file)
            with safe_open(self.folder / file, framework="pt") as opened:
                for item in items:
                    name = item.storage_index.fqn
                    tensor, target = opened.get_tensor(name), planner.resolve_tensor(item)
                    if digest(tensor) != self.index["tensors"][name]["sha256"] or tensor.dtype != target.dtype:
                        raise ValueError(f"{name} in {self.folder / file} is damaged.")
                    target.detach().copy_(tensor.view(target.shape))
                    planner.commit_tensor(item, target)
        return _completed(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


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


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # contiguous, and shared with no other


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    shape = torch.Size(entry["shape"])
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, entry["dtype"])), shape, [chunk])


def _completed(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
