"""Checkpoint files: round trip, damage, tied weights."""

import pytest
import torch
from helpers.short_runs import same

from featureflock.training.checkpoint import Checkpoint, read_newest, write


def checkpoint(step: int) -> Checkpoint:
    tensors = {"a": torch.full((3, 2), float(step)), "n": torch.tensor(step), "b": torch.randn(4).bfloat16()}
    return Checkpoint(tensors, {"step": step, "name": "é"})


def test_checkpoints_round_trip_and_the_last_two_are_stored(tmp_path):
    for step in (5, 10, 20):
        write(tmp_path, step, checkpoint(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "checkpoint-000000010.safetensors",
        "checkpoint-000000020.safetensors",
    ]
    wanted = checkpoint(20)
    write(tmp_path, 20, wanted)
    found, notes = read_newest(tmp_path)
    assert same(found.tensors, wanted.tensors)
    assert found.metadata == wanted.metadata
    assert not notes


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "header"])
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(damage, tmp_path):
    for step in (5, 10):
        write(tmp_path, step, checkpoint(step))
    newest = tmp_path / "checkpoint-000000010.safetensors"
    data = bytearray(newest.read_bytes())
    if damage == "flipped":
        data[-3] ^= 1
    newest.write_bytes({"truncated": data[:-5], "empty": b"", "flipped": data, "header": b"x" * len(data)}[damage])
    found, notes = read_newest(tmp_path)
    assert found.metadata["step"] == 5
    assert "checkpoint-000000010.safetensors is damaged" in notes[0]
    assert newest.with_suffix(".damaged").exists()
    write(tmp_path, 7, checkpoint(7))
    assert read_newest(tmp_path)[0].metadata["step"] == 7
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    for _ in range(2):  # a second attempt does not mistake the folder for a new run
        with pytest.raises(ValueError, match=r"All checkpoints in .* are damaged"):
            read_newest(tmp_path)


def test_tensors_that_share_memory_are_stored_separately(tmp_path):
    weight = torch.randn(4, 3)
    tensors = {"a": weight, "tied": weight, "row": weight[1], "empty": torch.zeros(0), "transposed": weight.T}
    write(tmp_path, 1, Checkpoint(tensors, {"step": 1}))
    assert same(read_newest(tmp_path)[0].tensors, tensors)
