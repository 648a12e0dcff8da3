"""An ensemble on many processes learns what it learns on one: every method, each way to divide the work.

In float64, so that nothing but rounding may differ; 5 members and batches of 11 and 9 cannot be divided equally.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.meshes import finish, host, start
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.testing import assert_close

import featureflock as ff
from featureflock.data import CustomData
from featureflock.distributed.failures import fresh_store_prefix
from featureflock.distributed.mesh import SINGLE_PROCESS, Axis, MeshShape, join_mesh
from featureflock.ensemble.execution import Execution
from featureflock.methods import (
    ADP,
    DICE,
    DeepEnsembles,
    FeatureMAP,
    FeatureWGD,
    FunctionWGD,
    Method,
    Single,
    WeightWGD,
)
from featureflock.models import CustomModelConfig
from featureflock.training import ComputeConfig, Recipe, train
from featureflock.training.checkpoint import read_newest

SHAPES = ((1, 2), (2, 1), (2, 2))
"""Members × data."""


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())


def normalised() -> nn.Module:
    """BatchNorm looks at a whole batch, so it is exact where members alone are divided."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())


def normalised_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Tanh())


def head() -> nn.Module:
    return nn.Linear(5, 3)


def normalising_head() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))


@dataclass(frozen=True)
class Case:
    method: Method
    shapes: tuple[tuple[int, int], ...]
    extractor: Callable[[], nn.Module] = plain
    head: Callable[[], nn.Module] = head
    members: int = 5
    execution: Execution = "sequential"
    steps: int = 20

    def trained(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """The weights and buffers of all members, in the first process."""
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
        method = self.method
        ens = method.build(
            self.extractor, self.head, members=self.members, seed=1, train_size=40, execution=self.execution
        )
        with join_mesh(MeshShape(*shape, timeout=60)) as mesh:
            ens.shard(mesh).train()
            optimisers = method.optimisers(ens, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
            for step in range(self.steps):
                torch.manual_seed(step)
                whole = torch.randperm(40)[: 11 - 2 * (step % 2)]
                part = whole[mesh.data.local_slice(len(whole))]
                mesh.batch_fraction = len(part) / len(whole)
                for optimiser in optimisers:
                    optimiser.zero_grad()
                method.loss(ens, x[part], y[part]).loss.backward()
                ens.average_gradients()
                for optimiser in optimisers:
                    optimiser.step()
            return mesh.gather_to_rank_zero(ens.state_dict())


METHODS = (DeepEnsembles(), FeatureWGD(), FunctionWGD(), WeightWGD(), FeatureMAP(), ADP())
CASES = {
    **{method.title: Case(method, ((1, 2), (2, 2))) for method in METHODS},
    **{f"{method.title}, BatchNorm": Case(method, ((2, 1),), normalised) for method in METHODS},
    "DICE": Case(DICE(ramp_epochs=1), ((2, 1),), normalised),
    "Single": Case(Single(), ((1, 2),), members=1),
    "no projection": Case(FeatureWGD(rank=None), ((2, 2),), steps=5),
    "vectorised": Case(FeatureWGD(), ((2, 2),), execution="vectorised", steps=5),
    "low memory": Case(FunctionWGD(), ((2, 2),), execution="low_memory", steps=5),
}
STATISTICS = {
    "inputs": (Case(DeepEnsembles(), SHAPES, normalised_first, steps=5), "extractors.4.0"),
    "features": (Case(FeatureWGD(), SHAPES, plain, normalising_head, steps=1), "head.0"),
}
ALL = {**CASES, **{name: case for name, (case, _) in STATISTICS.items()}}


def pictures() -> Recipe:
    """A recipe in which the order of the data and their augmentation could go wrong."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(53) % 3
    x = torch.randint(0, 90, (53, 1, 4, 4), generator=generator) + 60 * y[:, None, None, None]
    data = CustomData((x.to(torch.uint8), y), (x[:20].to(torch.uint8), y[:20]), padding=1, flip=True)
    return Recipe(data, CustomModelConfig(Exact), FeatureWGD(), members=5, epochs=4, batch=11, decay_epochs=(3,))


class Exact(nn.Sequential):
    """In float64, whatever the data are."""

    feature_dim = 6

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = super().forward(x.double())
        return features


def work(folder: Path, shape: tuple[int, int], ports: dict[str, int]) -> None:
    """All runs on a mesh of this shape, one after another."""
    torch.set_default_dtype(torch.float64)
    for name, case in ALL.items():
        if shape == (1, 1) or shape in case.shapes:
            os.environ["MASTER_PORT"] = str(ports[name])
            weights = case.trained(shape)
            if os.environ.get("RANK", "0") == "0":
                torch.save(weights, folder / f"{shape} {name}")
    if shape in ((1, 1), (2, 2)):
        os.environ["MASTER_PORT"] = str(ports["pictures"])
        train(pictures(), folder / f"{shape} pictures", compute=ComputeConfig(mesh=MeshShape(*shape, timeout=60)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What all meshes came to."""
    folder = tmp_path_factory.mktemp("meshes")
    for shape in ((1, 1), *SHAPES):
        stores = {name: host() for name in (*ALL, "pictures")}
        ports = {name: store.port for name, store in stores.items()}
        said, count = folder / f"said {shape}", shape[0] * shape[1]
        codes = finish(start(count, said, work, folder, shape, ports))
        assert codes == [0] * count, [path.read_text()[-2000:] for path in said.iterdir()]
    return folder


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, case in CASES.items() for shape in case.shapes])
def test_steps_on_a_mesh_are_those_of_one_process(folder, name, shape):
    one, many = (torch.load(folder / f"{s} {name}") for s in ((1, 1), shape))
    assert_close(many, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_every_member_moves(folder, name):
    """Or else the same would be true of members that stand still."""
    case, one = CASES[name], torch.load(folder / f"(1, 1) {name}")
    ens = case.method.build(case.extractor, case.head, members=case.members, seed=1, train_size=40)
    for name, before in ens.extractors.named_parameters():
        assert (one[f"extractors.{name}"] - before).abs().max() > 1e-3, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STATISTICS)
def test_running_means_of_parts_are_averaged_by_their_sizes(folder, name, shape):
    """A mean is the mean of its parts' means, so there the average is exact; a variance is not that of the parts."""
    layer = STATISTICS[name][1]
    one, many = (torch.load(folder / f"{s} {name}") for s in ((1, 1), shape))
    assert_close(many[f"{layer}.running_mean"], one[f"{layer}.running_mean"])
    difference = many[f"{layer}.running_var"] - one[f"{layer}.running_var"]
    assert (difference.abs().max() < 1e-9) == (shape[1] == 1)


def test_order_and_augmentation_do_not_depend_on_the_mesh(folder):
    """Weights, momentum, all that is measured, and one line an epoch."""
    one, many = (folder / f"{shape} pictures" for shape in ((1, 1), (2, 2)))
    before, after = (read_newest(run / "checkpoints")[0] for run in (one, many))
    assert before is not None
    assert after is not None
    assert before.metadata["step"] == after.metadata["step"] == 20
    sums = {"totals"}  # kept in float32 before they are added
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors.keys() - sums:
        assert_close(after.tensors[name], before.tensors[name], rtol=1e-9, atol=1e-10)
    assert len(measured(one)) == 4 + 3
    for ours, theirs in zip(measured(many), measured(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def measured(run: Path) -> list[dict[str, Any]]:
    """The epochs' lines and the end, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    test = json.loads((run / "result.json").read_text())["test"]
    of_members = [dict(enumerate(test.pop(f"member_{what}"))) for what in ("accuracy", "nll")]
    lines += [test, *of_members]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]


def on_axes() -> None:
    """What the axes do, in a mesh of 3 × 1: five rows in three parts."""
    torch.manual_seed(0)
    whole = torch.arange(10.0).view(5, 2)
    with join_mesh(MeshShape(timeout=30)) as mesh:
        axis, rank = mesh.members, mesh.world.rank
        own = whole[axis.local_slice(5)].clone().requires_grad_()
        gathered = axis.gather(own, 5)
        assert_close(gathered, whole)
        (gathered * whole.square()).sum().backward()
        assert_close(own.grad, whole.square()[axis.local_slice(5)])
        everything = whole.clone().requires_grad_()
        taken = axis.local_rows(everything)
        assert_close(taken, own)
        (taken * (rank + 1)).sum().backward()
        assert_close(everything.grad, torch.tensor([1.0, 1, 2, 2, 3])[:, None].expand(5, 2))
        assert axis.all_gather_int(10 * rank) == [0, 10, 20]
        assert mesh.data.all_gather_int(7) == [7]
        assert axis.max(torch.tensor([rank, -rank])).tolist() == [2, 0]
        assert mesh.on_rank_zero(lambda: rank) == 0
        with mesh.member_rng():
            drawn = torch.randint(2**40, (rank + 1,))  # of another length each
        assert len(set(axis.all_gather_int(int(drawn[0])))) == 3
        assert len(set(axis.all_gather_int(int(torch.randint(2**40, ()))))) == 1
        collected = mesh.gather_to_rank_zero(
            {f"of {rank}": own, "of all": torch.tensor([True]), "scalar": torch.tensor(rank)}
        )
        if mesh.is_rank_zero:
            assert_close(torch.cat([collected[f"of {r}"] for r in range(3)]), whole)
            assert collected["scalar"].item() == 0
            assert collected["of all"].dtype == torch.bool


def test_axes(tmp_path):
    assert finish(start(3, tmp_path, on_axes)) == [0, 0, 0], (tmp_path / "0").read_text()


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("size", range(1, 5))
def test_parts_are_a_partition_as_equal_as_can_be(count, size):
    parts = []
    for rank in range(size):
        axis = Axis()
        axis.size, axis.rank = size, rank
        parts.append(torch.arange(count)[axis.local_slice(count)])
    assert torch.equal(torch.cat(parts), torch.arange(count))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("late", [0, 1, 2])
def test_those_who_are_started_again_agree_on_what_those_before_did_not_know(late):
    """Also if one of them comes late, and the others find its predecessor's name first."""
    store = host()

    def come(rank: int, delay: float) -> Any:
        time.sleep(delay)
        return fresh_store_prefix([TCPStore("127.0.0.1", store.port)], rank, 3, timeout=20)[0]

    with ThreadPoolExecutor(3) as pool:
        before = list(pool.map(come, range(3), [0.0] * 3))
        after = list(pool.map(come, range(3), [0.3 * (rank == late) for rank in range(3)]))
    after[0].set("said", "")
    assert all(part.check(["said"]) for part in after)
    assert not any(part.check(["said"]) for part in before)


def test_one_process_is_the_mesh_1_by_1():
    with join_mesh() as mesh:
        assert mesh is SINGLE_PROCESS
        assert str(mesh) == "1 × 1"
        assert mesh.is_rank_zero
        assert mesh.batch_fraction == 1
    wrong = pytest.raises(
        ValueError, match=r"A mesh of 2 × 1 needs 2 processes, and there is 1; start it with torchrun"
    )
    with wrong, join_mesh(MeshShape(2)):
        pass


def saved_and_copied(folder: Path, members: int, data: int) -> None:
    with join_mesh(MeshShape(members, data, timeout=60)) as mesh:
        torch.manual_seed(0)
        extractors = [nn.Linear(4, 3) for _ in range(2)]
        ens = ff.Ensemble(extractors, nn.Linear(3, 2), ff.ParticleLayer(rank=1)).shard(mesh)
        path, x = folder / str(mesh.world.rank), torch.ones(5, 4)
        if members > 1:
            for use in (lambda: ff.save(ens, path), ens.for_inference):
                with pytest.raises(ValueError, match="Other processes have some of the members"):
                    use()
            assert not path.exists()
            return
        ff.save(ens, path)
        for copy in (ff.load(path), ens.for_inference(compile=False)):
            assert copy.mesh is SINGLE_PROCESS
            assert_close(copy.predict(x), ens.predict(x))
        assert ens.mesh is mesh
        assert isinstance(ens.layer, ff.ParticleLayer)
        assert ens.layer.group is mesh.data.group


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_what_is_divided_by_data_alone_is_saved_and_copied_and_what_misses_members_is_refused(tmp_path, shape):
    started = start(2, tmp_path / "said", saved_and_copied, tmp_path, *shape)
    assert finish(started) == [0, 0], (tmp_path / "said" / "0").read_text()
