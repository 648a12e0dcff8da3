"""Parts of an axis and the mesh of a single process; tests/system has meshes of several processes."""

import pytest
import torch

from featureflock.distributed.mesh import SINGLE_PROCESS, Axis, join_mesh
from featureflock.distributed.shape import MeshShape


@pytest.mark.parametrize("size", range(1, 5))
def test_parts_are_a_partition_as_equal_as_possible(size):
    for count in range(1, 9):
        parts = []
        for rank in range(size):
            axis = Axis()
            axis.size, axis.rank = size, rank
            parts.append(torch.arange(count)[axis.local_slice(count)])
        assert torch.equal(torch.cat(parts), torch.arange(count))
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def test_a_single_process_is_the_mesh_1_by_1():
    with join_mesh() as mesh:
        assert mesh is SINGLE_PROCESS
        assert str(mesh) == "1 × 1"
        assert mesh.is_rank_zero
        assert mesh.batch_fraction == 1
        x = torch.tensor([3])
        assert mesh.members.gather(x, 1) is mesh.members.local_rows(x) is mesh.average_gradient(x) is x
        assert mesh.world.max(x) is mesh.world.sum(x) is x
        assert mesh.data.all_gather_int(7) == [7]
        assert mesh.on_rank_zero(lambda: 5) == mesh.rank_zero_first(lambda: 5) == 5
        assert mesh.gather_to_rank_zero({"x": x}) == {"x": x}


def test_errors_name_the_number_of_processes(monkeypatch):
    message = r"A mesh of 2 × 1 needs 2 processes, not 1; start it with torchrun"
    with pytest.raises(ValueError, match=message), join_mesh(MeshShape(2)):
        pass
    with pytest.raises(ValueError, match="at least one process per axis; got 0 and None"):
        MeshShape(0)
    with pytest.raises(ValueError, match="positive number of seconds"):
        MeshShape(timeout=0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), join_mesh(MeshShape(2)):  # rank 0 reports it
        pass
