"""Checkpoint folders: round trip, damage, tied weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.short_runs import same

from featureflock.training.checkpoint import Checkpoint, CheckpointWriter, read_newest, write
from featureflock.utils.digests import json_digest


def metadata(step: int) -> dict[str, Any]:
    identity = {"recipe": {"name": "é"}, "data": "digest", "test_data": {"test": "digest"}, "compute": {}}
    return {**identity, "epoch": 0, "batch": step, "step": step, "seconds": 0.5, "unreadable": []}


def checkpoint(step: int) -> Checkpoint:
    tensors = {"a": torch.full((3, 2), float(step)), "n": torch.tensor(step), "b": torch.randn(4).bfloat16()}
    return Checkpoint(tensors, metadata(step))


def test_checkpoints_round_trip_and_the_last_two_are_stored(tmp_path):
    for step in (5, 10, 20):
        write(tmp_path, step, checkpoint(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "checkpoint-000000010",
        "checkpoint-000000020",
    ]
    wanted = checkpoint(20)
    write(tmp_path, 20, wanted)
    found, notes = read_newest(tmp_path)
    assert same(found.tensors, wanted.tensors)
    assert found.metadata == wanted.metadata
    assert not notes


def test_tensors_are_copied_before_training_goes_on(tmp_path):
    wanted, changing = checkpoint(5), checkpoint(5)
    changing = Checkpoint({name: wanted.tensors[name].clone() for name in wanted.tensors}, changing.metadata)
    with CheckpointWriter(tmp_path) as writer:
        writer.write(5, changing)
        for tensor in changing.tensors.values():
            tensor.add_(1)
    assert same(read_newest(tmp_path)[0].tensors, wanted.tensors)


def test_only_tensors_that_are_wanted_are_read(tmp_path):
    write(tmp_path, 5, checkpoint(5))
    path = tmp_path / "checkpoint-000000005" / "0.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    (where,) = {k for name, (k, _) in offsets(path).items() if name == "a"}
    data[start + where] ^= 1
    path.write_bytes(data)
    assert read_newest(tmp_path, wanted=lambda name: name != "a")[0].tensors.keys() == {"n", "b"}
    with pytest.raises(ValueError, match="are damaged"):
        read_newest(tmp_path)


def offsets(path: Path) -> dict[str, list[int]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("file", ["0.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "header", "missing"])
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(damage, file, tmp_path):
    for step in (5, 10):
        write(tmp_path, step, checkpoint(step))
    newest = tmp_path / "checkpoint-000000010"
    data = bytearray((newest / file).read_bytes())
    if damage == "flipped":
        data[-3] ^= 1
    changed = {"truncated": data[:-5], "empty": b"", "flipped": data, "header": b"x" * len(data)}
    if damage == "missing":
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(changed[damage])
    found, notes = read_newest(tmp_path)
    assert found.metadata["step"] == 5
    assert same(found.tensors | {"b": torch.zeros(())}, checkpoint(5).tensors | {"b": torch.zeros(())})
    assert "checkpoint-000000010 is damaged" in notes[0]
    assert newest.with_suffix(".damaged").exists()
    write(tmp_path, 7, checkpoint(7))
    assert read_newest(tmp_path)[0].metadata["step"] == 7
    for path in tmp_path.glob("*/*.safetensors"):
        path.write_bytes(b"")
    for _ in range(2):  # a second attempt does not mistake the folder for a new run
        with pytest.raises(ValueError, match=r"All checkpoints in .* are damaged"):
            read_newest(tmp_path)


def _without(key: str) -> Callable[[Path], None]:
    """A checkpoint with a valid digest that lacks a field."""

    def write_it(folder: Path) -> None:
        content = metadata(10)
        del content[key]
        write(folder, 10, Checkpoint({"a": torch.zeros(2)}, content))

    return write_it


def _with_header(text: bytes) -> Callable[[Path], None]:
    """A valid safetensors file without tensors."""

    def write_it(folder: Path) -> None:
        write(folder, 10, checkpoint(10))
        (_newest(folder) / "0.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)

    return write_it


def _with_entry(**changes: Any) -> Callable[[Path], None]:
    """An index with a valid digest and a wrong entry of a tensor, as somebody could write it on purpose."""

    def write_it(folder: Path) -> None:
        write(folder, 10, checkpoint(10))
        path = _newest(folder) / "checkpoint.json"
        index = json.loads(path.read_text())
        del index["sha256"]
        index["tensors"]["a"].update(changes)
        path.write_text(json.dumps({**index, "sha256": json_digest(index)}))

    return write_it


def _newest(folder: Path) -> Path:
    return folder / "checkpoint-000000010"


@pytest.mark.parametrize(
    "damage",
    [
        _with_header(b"{}"),
        _with_header(b'{"__metadata__":{}}'),
        _with_header(b'{"__metadata__":{"metadata":"{}","sha256":""}}'),
        _with_entry(file="../checkpoint-000000005/0.safetensors"),
        _with_entry(file="/dev/zero"),
        _with_entry(file="1.safetensors"),
        _with_entry(dtype="load"),
        _with_entry(dtype="int32"),
        _with_entry(shape=[10**15]),
        _with_entry(shape=[-3, -2]),
        _with_entry(shape=[3]),
        lambda folder: write(folder, 10, Checkpoint({}, metadata(10))),
        lambda folder: write(folder, 10, Checkpoint({"a": torch.zeros(2)}, {})),
        lambda folder: write(folder, 10, Checkpoint({"a": torch.zeros(2)}, [metadata(10)])),
        lambda folder: write(folder, 10, Checkpoint({"a": torch.zeros(2)}, {**metadata(10), "step": "ten"})),
        lambda folder: write(folder, 10, Checkpoint({"a": torch.zeros(2)}, {**metadata(10), "seconds": 10**400})),
        *(_without(key) for key in ("recipe", "data", "compute", "epoch", "batch", "step", "unreadable")),
    ],
)
def test_a_checkpoint_with_a_valid_header_but_no_content_is_renamed(damage, tmp_path):
    write(tmp_path, 5, checkpoint(5))
    damage(tmp_path)
    found, notes = read_newest(tmp_path)
    assert found.metadata["step"] == 5
    assert notes == [f"{_newest(tmp_path)} is damaged and was renamed; using the previous checkpoint."]
    assert not _newest(tmp_path).exists()


def test_a_checkpoint_that_cannot_be_read_is_not_renamed(tmp_path, monkeypatch):
    for step in (5, 10):
        write(tmp_path, step, checkpoint(step))

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # permissions do not stop root
        patch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError, match="cannot be read; change its permissions"):
            read_newest(tmp_path)
    assert read_newest(tmp_path)[0].metadata["step"] == 10
    index = _newest(tmp_path) / "checkpoint.json"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(ValueError, match="is not a regular file"):  # and does not block
        read_newest(tmp_path)


def test_tensors_that_share_memory_are_stored_separately(tmp_path):
    weight = torch.randn(4, 3)
    tensors = {"a": weight, "tied": weight, "row": weight[1], "empty": torch.zeros(0), "transposed": weight.T}
    write(tmp_path, 1, Checkpoint(tensors, metadata(1)))
    assert same(read_newest(tmp_path)[0].tensors, tensors)


def test_a_single_process_does_not_import_distributed_checkpoints(tmp_path):
    """The import takes half a second and 50 MB."""
    code = f"""
import sys
from dataclasses import replace
from featureflock.evaluation import evaluate_runs
from featureflock.training import RECIPES, train
assert "torch._dynamo" not in sys.modules  # optimisers import it
train(replace(RECIPES["digits"].recipe, epochs=1, subset=100), {str(tmp_path / "run")!r})
assert "torch.distributed.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read_newest(tmp_path / "run" / "checkpoints")[0].metadata["epoch"] == 0
