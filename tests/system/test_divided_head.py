"""Layer and shared head are computed once per row of the mesh, and gradients are those of one process."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.meshes import finish, start
from torch import Tensor, nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.distributed.mesh import Mesh, join_mesh
from featureflock.distributed.shape import MeshShape
from featureflock.methods import FeatureWGD

n, H, C = 5, 6, 4


class BatchDependent(nn.Module):
    """A head of the user's own, whose output for an example depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))


def per_example() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(H, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, C))


CASES = {  # layer, head, batch, execution
    "Linear": (ff.ParticleLayer(rank=3), lambda: nn.Linear(H, C), 8, "sequential"),
    "no projection": (ff.ParticleLayer(), per_example, 8, "vectorised"),
    "reference batch": (ff.ParticleLayer(rank=2, reference_batch=4), per_example, 7, "low_memory"),
    "no layer": (None, per_example, 8, "sequential"),
    "fewer examples than processes": (ff.ParticleLayer(rank=3), per_example, 2, "sequential"),
    "one example, vectorised": (ff.ParticleLayer(rank=3), per_example, 1, "vectorised"),
    "a head of the user's own": (ff.ParticleLayer(rank=3), BatchDependent, 8, "sequential"),
    "BatchNorm": (ff.ParticleLayer(rank=3), lambda: nn.Sequential(nn.BatchNorm1d(H), nn.Linear(H, C)), 8, "sequential"),
    "a layer on the logits": (ff.ParticleLayer(rank=3), per_example, 8, "sequential"),
}
DIVIDED = {*list(CASES)[:6], "a layer on the logits"}


def gradients(name: str, mesh: Mesh, how: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """Logits, gradients of this process, and the number of examples, times n, that its head was computed for."""
    layer, make_head, B, execution = CASES[name]
    torch.manual_seed(0)
    extractors = [nn.Sequential(nn.Linear(3, H), nn.Tanh()) for _ in range(n)]
    at = "logits" if name == "a layer on the logits" else "features"
    ens = ff.Ensemble(extractors, make_head(), layer, at=at, execution=execution).shard(mesh)
    if how == "frozen":  # those of the first process, if there are several
        for extractor in extractors[:2]:
            extractor.requires_grad_(False)
    rows = []
    ens.head.register_forward_hook(lambda module, inputs, out: rows.append(len(out)))
    x, y = torch.randn(B, 3), torch.randint(C, (B,))
    part = mesh.data.local_slice(B)
    mesh.batch_fraction = len(y[part]) / B
    if how == "method":
        loss = FeatureWGD().loss(ens, x[part], y[part]).loss
    else:
        loss = F.cross_entropy(ens(x[part]).flatten(0, 1), y[part].repeat(n))
    computed = sum(rows)
    loss.backward()
    ens.average_gradients()
    return ens(x[part]).detach(), {k: p.grad for k, p in ens.named_parameters() if p.grad is not None}, computed


def work(folder: Path, shape: tuple[int, int]) -> None:
    torch.set_default_dtype(torch.float64)
    with join_mesh(MeshShape(*shape, timeout=60)) as mesh:
        found = {}
        for name, (_, _, B, _) in CASES.items():
            for how in ("method", "plain", "frozen"):
                if shape[1] > B or (shape[1] > 1 and (how == "frozen" or name not in DIVIDED)):
                    continue
                logits, grads, rows = gradients(name, mesh, how)
                found[name, how] = logits, grads, mesh.members.all_gather_int(rows)
        torch.save(found, folder / f"{mesh.world.rank}")
        with torch.autocast("cpu", torch.bfloat16):  # the dtype of the features
            assert gradients("Linear", mesh, "method")[1]["head.weight"].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_gradients_are_those_of_one_process(shape, tmp_path):
    """With 2, 2 and 1 members, and parts of 3, 3 and 2 examples or fewer."""
    count = shape[0] * shape[1]
    codes = finish(start(count, tmp_path / "output", work, tmp_path, shape))
    assert codes == [0] * count, [path.read_text()[-2000:] for path in (tmp_path / "output").iterdir()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for rank in range(count):
            for (name, how), (logits, grads, rows) in torch.load(tmp_path / f"{rank}").items():
                expected_logits, expected, _ = gradients(name, Mesh(), how)
                part = torch.arange(CASES[name][2]).tensor_split(shape[1])[rank // shape[0]]
                assert_close(logits, expected_logits[:, part])
                assert {key.split(".")[0] for key in expected.keys() - grads.keys()} == {"extractors"}
                for key, grad in grads.items():
                    why = f"{name}, {how}, {key}"
                    assert_close(grad, expected[key], rtol=1e-9, atol=1e-11, msg=lambda m, why=why: f"{why}: {m}")
                assert sum(rows) == n * len(part) * (1 if name in DIVIDED else shape[0]), name
    finally:
        torch.set_default_dtype(before)
