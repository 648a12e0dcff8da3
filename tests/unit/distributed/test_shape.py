"""The shape of a mesh for a number of processes and members."""

import pytest

from featureflock.distributed.shape import MeshShape


@pytest.mark.parametrize(
    ("shape", "processes", "n", "sizes"),
    [
        (MeshShape(), 4, None, (4, 1)),
        (MeshShape(), 4, 5, (4, 1)),
        (MeshShape(), 4, 3, (2, 2)),
        (MeshShape(), 5, 3, (1, 5)),
        (MeshShape(), 24, 10, (8, 3)),
        (MeshShape(data=2), 6, 5, (3, 2)),
        (MeshShape(members=2), 6, 5, (2, 3)),
        (MeshShape(3, 2), 6, 5, (3, 2)),
    ],
)
def test_what_is_left_open_follows_from_processes_and_members(shape, processes, n, sizes):
    assert shape.sizes(processes, n) == shape.sizes(processes, n, adapt=True) == sizes


@pytest.mark.parametrize(
    ("shape", "processes", "needed", "adapted"),
    [
        (MeshShape(4, 2), 6, "A mesh of 4 × 2 needs 8 processes, not 6", (3, 2)),
        (MeshShape(4, 2), 1, "A mesh of 4 × 2 needs 8 processes, not 1", (1, 1)),
        (MeshShape(data=2), 3, "A mesh of 1 × 2 needs 2 processes, not 3", (1, 3)),
        (MeshShape(members=4), 3, "A mesh of 4 × 1 needs 4 processes, not 3", (3, 1)),
        (MeshShape(5, 8), 32, "A mesh of 5 × 8 needs 40 processes, not 32", (4, 8)),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_or_adapted(shape, processes, needed, adapted):
    with pytest.raises(ValueError, match=needed):
        shape.sizes(processes, 5)
    assert shape.sizes(processes, 5, adapt=True) == adapted


def test_an_adapted_mesh_of_any_size_has_a_member_for_every_column():
    for n in range(1, 6):
        for processes in range(1, 33):
            for shape in (MeshShape(), MeshShape(data=4), MeshShape(members=3), MeshShape(3, 4)):
                members, data = shape.sizes(processes, n, adapt=True)
                assert members * data == processes
                assert members <= n or members * data == (shape.members or members) * (shape.data or data)
