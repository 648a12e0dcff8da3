"""The particle layer under plain DistributedDataParallel, in two processes."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.meshes import finish, start
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import featureflock as ff

N, B, H, C = 3, 8, 5, 4


class Model(nn.Module):
    """An ensemble in a user's own module, which returns its loss."""

    def __init__(self, layer: ff.ParticleLayer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extractors = nn.ModuleList(nn.Linear(H, H).double() for _ in range(N))
        self.head, self.layer = nn.Linear(H, C).double(), layer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = torch.stack([f(x) for f in self.extractors])
        return ff.particle_loss(
            features, lambda h: F.cross_entropy(self.head(h).flatten(0, 1), y.repeat(N)), self.layer
        )


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(B) % C


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = (part.chunk(2)[rank] for part in data())
    options = {"prior": ff.Cauchy(0.1), "rank": 2, "repulsion": 5.0, "reference_batch": 4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(Model(ff.ParticleLayer(**options, group=dist.group.WORLD)))
        (0.5 * model(x, y)).backward()
        with_group = [str(w.message) for w in caught if "ParticleLayer" in str(w.message)]
        DistributedDataParallel(Model(ff.ParticleLayer(**options)))(x, y).backward()
        without = [str(w.message) for w in caught if "ParticleLayer" in str(w.message)]
    torch.save({"gradients": gradients(model), "with": with_group, "without": without}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_with_a_group_are_one_and_without_it_are_warned(tmp_path):
    assert finish(start(2, tmp_path / "output", work, tmp_path)) == [0, 0]
    model = Model(ff.ParticleLayer(ff.Cauchy(0.1), rank=2, repulsion=5.0, reference_batch=4))
    (0.5 * model(*data())).backward()
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt")
        for ours, theirs in zip(result["gradients"], gradients(model), strict=True):
            assert_close(ours, theirs)
        assert result["with"] == []
        assert "pass group=torch.distributed.group.WORLD" in result["without"][0]
