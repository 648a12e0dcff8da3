"""A process builds its own members only: the same weights as one process, in a part of its memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.allocations import Allocations
from helpers.meshes import finish, start
from helpers.short_runs import same
from torch import nn

import featureflock as ff
from featureflock.distributed.mesh import Mesh, join_mesh
from featureflock.distributed.shape import MeshShape
from featureflock.ensemble.ensemble import RemoteMember
from featureflock.ensemble.sharded_saving import save_sharded
from featureflock.methods import DICE, DeepEnsembles, FeatureWGD, WeightWGD
from featureflock.tasks import Regression
from featureflock.training.build import parameter_count


def extractor() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))


def wide_extractor() -> nn.Module:
    """Larger than its description."""
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 10))


def head() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(10, 3))


def linear_head() -> nn.Module:
    return nn.Linear(10, 3)


def trunk() -> nn.Module:
    return nn.Linear(20, 20)


CASES: dict[str, Callable[[Mesh], ff.Ensemble]] = {
    "shared head": lambda mesh: FeatureWGD().build(extractor, head, members=5, seed=3, mesh=mesh),
    "heads": lambda mesh: DeepEnsembles().build(extractor, head, members=5, seed=3, task=Regression(), mesh=mesh),
    "weights": lambda mesh: WeightWGD().build(extractor, head, members=5, train_size=9, mesh=mesh),
    "trunk": lambda mesh: FeatureWGD().build(extractor, head, members=5, trunk=trunk, mesh=mesh),
    "rank one": lambda mesh: DeepEnsembles().build(extractor, head, members=5, share=ff.rank_one, mesh=mesh),
    "shares nothing": lambda mesh: FeatureWGD().build(extractor, head, members=5, share=lambda *_: None, mesh=mesh),
    "DICE": lambda mesh: DICE().build(extractor, linear_head, members=5, train_size=9, mesh=mesh),
}


def build_all(folder: Path) -> None:
    """On 3 processes, with 2, 2 and 1 members."""
    with join_mesh(MeshShape(timeout=60)) as mesh:
        for name, build in CASES.items():
            random = torch.get_rng_state()
            ours, whole = build(mesh), build(Mesh())
            assert torch.equal(torch.get_rng_state(), random)
            remote = [m for modules in ours._member_modules() for m in modules if isinstance(m, RemoteMember)]
            others = 5 - len(mesh.local_members(5))
            assert len(remote) == others * len(ours._member_modules()), name
            save_sharded(ours, folder / name)
            if mesh.is_rank_zero:
                assert same(ff.load(folder / name).state_dict(), whole.state_dict()), name
                ff.save(whole, folder / f"{name}, whole")
                indices = [json.loads((folder / f / "ensemble.json").read_text()) for f in (name, f"{name}, whole")]
                for index in indices:
                    del index["weights"], index["sha256"]
                assert indices[0] == indices[1], name
            local, expected = ours.state_dict(), whole.shard(mesh).state_dict()
            assert same(local, expected), name
            assert parameter_count(ours) == sum(p.numel() for p in build(Mesh()).parameters()), name


def test_members_are_those_of_one_process(tmp_path):
    output = tmp_path / "output"
    assert finish(start(3, output, build_all, tmp_path)) == [0, 0, 0], [path.read_text() for path in output.iterdir()]


def count(folder: Path, members: int) -> None:
    """Build n members on this mesh, and write what was allocated."""
    built: list[int] = []

    def counted() -> nn.Module:
        built.append(1)
        return wide_extractor()

    with join_mesh(MeshShape(timeout=60)) as mesh, Allocations() as allocations:
        ens = FeatureWGD().build(counted, head, members=members, mesh=mesh)
        found = {"peak": allocations.peak, "total": allocations.total, "alive": allocations.alive, "built": len(built)}
        assert len(ens) == members
        save_sharded(ens, folder / f"ensemble {members} {mesh.world.size}")
        found["peak of saving"] = allocations.peak
    (folder / f"{members} {mesh.world.size} {mesh.world.rank}.json").write_text(json.dumps(found))


def counts(folder: Path, members: int, processes: int) -> list[dict[str, Any]]:
    codes = finish(start(processes, folder / f"output {members} {processes}", count, folder, members))
    assert codes == [0] * processes
    return [json.loads((folder / f"{members} {processes} {rank}.json").read_text()) for rank in range(processes)]


def test_memory_of_a_process_does_not_grow_with_the_number_of_members(tmp_path):
    """25 members in each process: 100 in four take as much as 25 in one, and a quarter of 100 in one."""
    (few,), (all_,) = counts(tmp_path, 25, 1), counts(tmp_path, 100, 1)
    of_head = 4 * sum(p.numel() for p in head().parameters())
    of_member = 4 * sum(p.numel() for p in wide_extractor().parameters())
    assert few["alive"] == pytest.approx(25 * of_member + of_head, abs=100)  # the count is that of the weights
    assert all_["alive"] == pytest.approx(100 * of_member + of_head, abs=100)
    for process in counts(tmp_path, 100, 4):
        assert process["built"] == 25
        assert process["alive"] == pytest.approx(few["alive"], abs=100)
        assert process["peak"] <= few["peak"] + 2 * of_head
        assert process["total"] <= few["total"] + 2 * of_head + 100  # nor was more allocated and released
        # To save them, rank 0 has one tensor of the others at a time, and a description of their modules.
        assert process["peak of saving"] <= few["peak"] + 10 * of_member
    assert len(ff.load(tmp_path / "ensemble 100 4")) == 100
