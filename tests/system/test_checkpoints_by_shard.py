"""Checkpoints that all processes write: complete or ignored, and read in parts by any other mesh."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from helpers.meshes import finish, start
from helpers.short_runs import same
from torch import Tensor

from featureflock.distributed import failures
from featureflock.distributed.mesh import Mesh, join_mesh
from featureflock.distributed.shape import MeshShape
from featureflock.training import checkpoint_storage
from featureflock.training.checkpoint import Checkpoint, CheckpointWriter, read_newest, write

MEMBERS, SIZE = 10, 1000


def tensors(members: range, step: int) -> dict[str, Tensor]:
    """A large tensor of each member, and a small one that all processes have."""
    return {f"member {i}": torch.full((SIZE,), float(100 * step + i)) for i in members} | {"shared": torch.tensor(step)}


def checkpoint(members: range, step: int) -> Checkpoint:
    identity: dict[str, Any] = {"recipe": {}, "data": "digest", "compute": {}}
    progress: dict[str, Any] = {"epoch": 0, "batch": step, "step": step, "seconds": 0.5, "unreadable": []}
    return Checkpoint(tensors(members, step), {**identity, **progress})


def write_on(mesh: Mesh, folder: Path, step: int) -> None:
    with CheckpointWriter(folder, mesh) as writer:
        writer.write(step, checkpoint(mesh.local_members(MEMBERS), step))


def read_on(mesh: Mesh, folder: Path) -> tuple[Checkpoint | None, list[str], int]:
    """This process's part of the newest checkpoint, messages, and the bytes of the tensors that were read."""
    wanted, read = tensors(mesh.local_members(MEMBERS), 0), list[int]()

    class Counting:
        def __init__(self, path: Path, **options: Any) -> None:
            self.file = safetensors.safe_open(path, **options)

        def __enter__(self) -> "Counting":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            tensor: Tensor = self.file.get_tensor(name)
            read.append(tensor.nbytes)
            return tensor

    checkpoint_storage.safe_open = Counting  # type: ignore[assignment]
    found, messages = read_newest(folder, mesh, lambda name: name in wanted)
    return found, messages, sum(read)


def write_both(folder: Path, shape: tuple[int, int]) -> None:
    with join_mesh(MeshShape(*shape, timeout=60)) as mesh:
        for step in (5, 10):
            write_on(mesh, folder, step)


def read_part(folder: Path, shape: tuple[int, int], step: int) -> None:
    """Read on another mesh, and compare."""
    with join_mesh(MeshShape(*shape, timeout=60)) as mesh:
        members = mesh.local_members(MEMBERS)
        found, messages, count = read_on(mesh, folder)
        assert found is not None
        assert found.metadata["step"] == step
        assert same(found.tensors, tensors(members, step))
        assert len(messages) == (step == 5)
        assert count <= 4 * SIZE * len(members) * (1 + len(messages)) + 100, count


def run(folder: Path, processes: int, work: Any, *args: Any) -> None:
    output = folder.parent / f"output of {work.__name__} {args}"
    codes = finish(start(processes, output, work, folder, *args))
    assert codes == [0] * processes, [path.read_text()[-1500:] for path in output.iterdir()]


def test_each_process_writes_and_reads_its_own_part(tmp_path):
    folder = tmp_path / "checkpoints"
    run(folder, 4, write_both, (2, 2))
    newest = folder / "checkpoint-000000010"
    entries = json.loads((newest / "checkpoint.json").read_text())["tensors"]
    sizes = [sum(e["shape"] == [SIZE] for e in entries.values() if e["file"] == f"{r}.safetensors") for r in range(4)]
    assert sum(sizes) == MEMBERS  # each is written once
    assert min(sizes) >= 2  # by all four: processes with the same members share the work
    for shape in ((3, 1), (1, 2)):
        run(folder, shape[0] * shape[1], read_part, shape, 10)
    assert same(read_newest(folder)[0].tensors, tensors(range(MEMBERS), 10))  # and by one process
    file = newest / entries["member 9"]["file"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)  # in the part of one process; all of them use the previous checkpoint
    run(folder, 3, read_part, (3, 1), 5)
    assert newest.with_suffix(".damaged").exists()


def fail(folder: Path, how: str, rank: int) -> None:
    """One process fails, or is killed, while it writes the second checkpoint."""
    failures.HEARTBEAT_SECONDS, failures.GRACE_SECONDS = 0.1, 1.0
    save_file = checkpoint_storage.save_file

    def failing(content: dict[str, Tensor], path: Path) -> None:
        save_file({name: t[: SIZE // 2] if t.ndim else t for name, t in content.items()}, path)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise safetensors.SafetensorError("No space left on device")

    with join_mesh(MeshShape(timeout=60)) as mesh:
        write_on(mesh, folder, 5)
        if mesh.world.rank == rank:
            checkpoint_storage.save_file = failing
        if how == "kill":
            write_on(mesh, folder, 10)
        with pytest.raises(OSError, match=r"^No space left on device$"):  # on every process
            write_on(mesh, folder, 10)


@pytest.mark.parametrize(("how", "rank"), [("raise", 1), ("kill", 1), ("kill", 0)])
def test_a_checkpoint_is_complete_or_ignored(how, rank, tmp_path):
    folder = tmp_path / "checkpoints"
    codes = finish(start(2, tmp_path / "output", fail, folder, how, rank))
    assert codes == ([0, 0] if how == "raise" else [-signal.SIGKILL, 1] if rank == 0 else [1, -signal.SIGKILL])
    found, messages = read_newest(folder)
    assert found.metadata["step"] == 5
    assert same(found.tensors, tensors(range(MEMBERS), 5))
    assert not messages
    left = [path.name for path in folder.iterdir() if path.name != "checkpoint-000000005"]
    assert len(left) == (how == "kill" and rank == 0)
    write(folder, 12, checkpoint(range(MEMBERS), 12))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-000000005", "checkpoint-000000012"]
