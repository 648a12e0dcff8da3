"""Training on several processes gives the same as on one: every method, each shape of the mesh.

In float64, so that only rounding may differ. 5 members and batches of 11 and 9 cannot be divided equally.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.meshes import finish, host, start
from torch import Tensor, nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.data import CustomData
from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh, join_mesh
from featureflock.distributed.shape import MeshShape
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
from featureflock.tasks import Classification, Regression, Task
from featureflock.training import ComputeConfig, Recipe, train
from featureflock.training.checkpoint import read_newest

SHAPES = ((1, 2), (2, 1), (2, 2))
"""Members × data."""


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())


def normalised() -> nn.Module:
    """BatchNorm needs the whole batch, so it is exact only if the members are divided."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())


def normalised_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Tanh())


def head() -> nn.Module:
    return nn.Linear(5, 3)


def trunk() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def lora(extractor: nn.Module, members: int) -> ff.ensemble.SharedMembers:
    return ff.lora(extractor, members, 2)


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
    steps: int = 8
    task: Task = Classification()
    share: Callable[[nn.Module, int], Any] | None = None
    trunk: Callable[[], nn.Module] | None = None
    micro_batch: int | None = None

    def build(self) -> ff.Ensemble:
        arguments = {"members": self.members, "seed": 1, "train_size": 40, "execution": self.execution}
        arguments |= {"task": self.task, "share": self.share, "trunk": self.trunk}
        return self.method.build(self.extractor, self.head, **arguments)

    def train(self, mesh: Mesh) -> dict[str, Tensor]:
        """Train on a mesh, and return the weights and buffers of all members on rank 0."""
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
        if self.task.kind == "regression":
            y = torch.randn(40, 3, generator=generator)
        method = self.method
        ens = self.build().shard(mesh).train()
        optimisers = method.optimisers(ens, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        for step in range(self.steps):
            torch.manual_seed(step)
            batch = torch.randperm(40)[: 11 - 2 * (step % 2)]
            part = batch[mesh.data.local_slice(len(batch))]
            mesh.batch_fraction = len(part) / len(batch)
            for optimiser in optimisers:
                optimiser.zero_grad()
            divided = self.micro_batch is not None and mesh.world.size > 1
            inputs = ff.MicroBatches(x[part].split(self.micro_batch)) if divided else x[part]
            method.loss(ens, inputs, y[part]).loss.backward()
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
    "trunk": Case(FeatureWGD(), ((1, 2), (2, 2)), trunk=trunk, steps=5),
    "trunk, Deep Ensembles": Case(DeepEnsembles(), ((2, 2),), trunk=trunk, steps=5),
    "trunk, weights": Case(WeightWGD(), ((2, 2),), trunk=trunk, steps=5),
    "rank one": Case(FeatureWGD(), ((1, 2), (2, 2)), share=ff.rank_one, steps=5),
    "rank one, Deep Ensembles": Case(DeepEnsembles(), ((2, 2),), share=ff.rank_one, trunk=trunk, steps=5),
    "rank one, BatchNorm": Case(FunctionWGD(), ((2, 1),), normalised, share=ff.rank_one, steps=5),
    "rank one, low memory": Case(FeatureWGD(), ((2, 2),), share=ff.rank_one, execution="low_memory", steps=5),
    "LoRA": Case(FeatureWGD(rank=1), ((2, 2),), share=lora, steps=5),  # members that start equal have one direction
    "micro-batches": Case(FeatureWGD(), ((2, 2),), trunk=trunk, steps=5, micro_batch=2),
    "micro-batches, weights": Case(WeightWGD(), ((2, 2),), trunk=trunk, steps=5, micro_batch=2),
    "regression, shared variance": Case(FeatureWGD(), SHAPES, steps=5, task=Regression()),
    "regression, variance of each member": Case(DeepEnsembles(), SHAPES, steps=5, task=Regression()),
}
STATISTICS = {
    "inputs": (Case(DeepEnsembles(), SHAPES, normalised_first, steps=5), "extractors.4.0"),
    "features": (Case(FeatureWGD(), SHAPES, plain, normalising_head, steps=1), "head.0"),
}
ALL = {**CASES, **{name: case for name, (case, _) in STATISTICS.items()}}


def images() -> Recipe:
    """A recipe whose result depends on the order of the data and on their augmentation."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(53) % 3
    x = torch.randint(0, 90, (53, 1, 4, 4), generator=generator) + 60 * y[:, None, None, None]
    data = CustomData((x.to(torch.uint8), y), (x[:20].to(torch.uint8), y[:20]), padding=1, flip=True)
    return Recipe(data, CustomModelConfig(Exact), FeatureWGD(), members=5, epochs=4, batch=11, decay_epochs=(3,))


class Exact(nn.Sequential):
    """In float64 for data of any dtype."""

    feature_dim = 6

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = super().forward(x.double())
        return features


def train_all(folder: Path, shape: tuple[int, int], image_port: int) -> None:
    """Train all cases on a mesh of this shape."""
    torch.set_default_dtype(torch.float64)
    with join_mesh(MeshShape(*shape, timeout=60)) as mesh:
        for name, case in ALL.items():
            if shape == (1, 1) or shape in case.shapes:
                weights = case.train(mesh)
                if mesh.is_rank_zero:
                    torch.save(weights, folder / f"{shape} {name}")
    if shape in ((1, 1), (2, 2)):
        os.environ["MASTER_PORT"] = str(image_port)
        train(images(), folder / f"{shape} images", compute=ComputeConfig(mesh=MeshShape(*shape, timeout=60)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The results of all meshes."""
    folder = tmp_path_factory.mktemp("meshes")
    for shape in ((1, 1), *SHAPES):
        store, output, count = host(), folder / f"output {shape}", shape[0] * shape[1]
        codes = finish(start(count, output, train_all, folder, shape, store.port))
        assert codes == [0] * count, [path.read_text()[-2000:] for path in output.iterdir()]
    return folder


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, case in CASES.items() for shape in case.shapes])
def test_steps_on_a_mesh_are_those_of_one_process(folder, name, shape):
    one, many = (torch.load(folder / f"{s} {name}") for s in ((1, 1), shape))
    assert_close(many, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_every_member_moves(folder, name):
    """Otherwise the test above would also pass for members that are not trained."""
    case, one = CASES[name], torch.load(folder / f"(1, 1) {name}")
    for name, before in case.build().named_parameters():
        if before.requires_grad and not name.startswith("layer."):
            assert (one[name] - before).abs().max() > 1e-4, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STATISTICS)
def test_running_means_of_parts_are_averaged_by_their_sizes(folder, name, shape):
    """The average of the means of parts is exact; the average of their variances is not."""
    layer = STATISTICS[name][1]
    one, many = (torch.load(folder / f"{s} {name}") for s in ((1, 1), shape))
    assert_close(many[f"{layer}.running_mean"], one[f"{layer}.running_mean"])
    difference = many[f"{layer}.running_var"] - one[f"{layer}.running_var"]
    assert (difference.abs().max() < 1e-9) == (shape[1] == 1)


def test_order_and_augmentation_do_not_depend_on_the_mesh(folder):
    """Weights, momentum, metrics, and one line per epoch."""
    one, many = (folder / f"{shape} images" for shape in ((1, 1), (2, 2)))
    before, after = (read_newest(run / "checkpoints")[0] for run in (one, many))
    assert before is not None
    assert after is not None
    assert before.metadata["step"] == after.metadata["step"] == 20
    sums = {"totals"}  # stored in float32 before they are added
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors.keys() - sums:
        assert_close(after.tensors[name], before.tensors[name], rtol=1e-9, atol=1e-10)
    assert len(metrics(one)) == 4 + 3
    for ours, theirs in zip(metrics(many), metrics(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of the epochs and the test metrics, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    test = json.loads((run / "result.json").read_text())["test"]
    of_members = [dict(enumerate(test.pop(f"member_{what}"))) for what in ("accuracy", "nll")]
    lines += [test, *of_members]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]


def on_axes() -> None:
    """The operations of the axes in a mesh of 3 × 1: five rows in three parts."""
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


def saved_and_copied(folder: Path, members: int, data: int) -> None:
    with join_mesh(MeshShape(members, data, timeout=60)) as mesh:
        torch.manual_seed(0)
        extractors = [nn.Linear(4, 3) for _ in range(2)]
        ens = ff.Ensemble(extractors, nn.Linear(3, 2), ff.ParticleLayer(rank=1)).shard(mesh)
        path, x = folder / str(mesh.world.rank), torch.ones(5, 4)
        if members > 1:
            for use in (lambda: ff.save(ens, path), ens.for_inference):
                with pytest.raises(ValueError, match="Some members are on other processes"):
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
def test_saving_and_copying_need_all_members(tmp_path, shape):
    started = start(2, tmp_path / "output", saved_and_copied, tmp_path, *shape)
    assert finish(started) == [0, 0], (tmp_path / "output" / "0").read_text()
