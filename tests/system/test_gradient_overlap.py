"""Gradients are summed while the backward pass is running, and are those of the whole batch."""

from pathlib import Path

import torch
import torch.distributed as dist
from helpers.meshes import finish, start
from torch import Tensor, nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.distributed.mesh import join_mesh
from featureflock.distributed.shape import MeshShape
from featureflock.methods import FeatureWGD

SIZE, BATCH = 600, 7  # a layer of 1.4 MB fills the first bucket


def build(mesh=None) -> ff.Ensemble:
    layers = [
        lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)),
        lambda: nn.Linear(SIZE, 3),
    ]
    return FeatureWGD().build(*layers, members=2, **({} if mesh is None else {"mesh": mesh}))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(0)), torch.arange(BATCH) % 3


def gradients(ens: ff.Ensemble) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in ens.named_parameters()}


def overlap(folder: Path) -> None:
    with join_mesh(MeshShape(data=2, timeout=60)) as mesh:
        ens, (x, y) = build(mesh), batch()
        part, events = mesh.data.local_slice(BATCH), list[str]()
        mesh.batch_fraction = len(y[part]) / BATCH  # 4 and 3 of 7 examples
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args, async_op: bool = False, **kwargs):
            events.extend(["sum"] * async_op)
            return original(tensor, *args, async_op=async_op, **kwargs)

        dist.all_reduce = all_reduce
        for name, p in ens.named_parameters():
            p.register_hook(lambda grad, name=name: events.append(name))
        found = []
        for times in (1, 1, 2):  # the last time, two backward passes are added up
            ens.zero_grad()
            events.clear()
            for _ in range(times):
                FeatureWGD().loss(ens, x[part], y[part]).loss.backward()
            backward = list(events)
            ens.average_gradients()
            found.append((backward, list(events), gradients(ens)))
        for p in ens.extractors[0].parameters():  # other parameters than before
            p.requires_grad_(False)
        ens.zero_grad()
        FeatureWGD().loss(ens, x[part], y[part]).loss.backward()
        ens.average_gradients()
        found.append(([], [], {name: p.grad for name, p in ens.named_parameters() if p.grad is not None}))
        torch.save(found, folder / f"{mesh.world.rank}.pt")


def test_sums_start_before_the_backward_pass_has_reached_the_first_layer(tmp_path):
    assert finish(start(2, tmp_path / "output", overlap, tmp_path)) == [0, 0], (tmp_path / "output" / "0").read_text()
    ens, (x, y) = build(), batch()
    FeatureWGD().loss(ens, x, y).loss.backward()
    expected = gradients(ens)
    for rank in range(2):
        first, second, twice, frozen = torch.load(tmp_path / f"{rank}.pt")
        assert "sum" not in first[0]  # nobody has asked for an average yet
        events, all_events, _ = second
        before_the_last = events[: events.index("extractors.0.0.weight")]
        assert before_the_last.count("sum") == 2  # those of the head and of the last layer
        assert events.index("sum") < events.index("extractors.1.2.weight")
        assert all_events.count("sum") == events.count("sum") >= 3  # and nothing is left to do afterwards
        assert_close(first[2], expected, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(second[2][name], first[2][name]) for name in expected)  # the same bits
        assert_close(twice[2], {name: 2 * grad for name, grad in expected.items()}, rtol=1e-4, atol=1e-6)
        assert frozen[2].keys() == {name for name in expected if not name.startswith("extractors.0.")}
        assert_close(frozen[2], {name: expected[name] for name in frozen[2]}, rtol=1e-4, atol=1e-6)
