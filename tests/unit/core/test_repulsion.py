"""The strength of the repulsion τ: its meaning, its dependence on the batch size, and losses of any scale."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import reference
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import FeatureMAP, FeatureWGD, FunctionWGD, WeightWGD

N, B, H, C = 4, 6, 5, 3
RULES = {"WGD": ff.WGD(), "SVGD": ff.SVGD(), "SteinWGD": ff.SteinWGD()}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- transport


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("repulsion", [0.0, 0.3, 1.0, 7.0])
def test_the_repulsive_term_is_multiplied(rule, rank, repulsion):
    """Against the naive version, in which only the repulsive term is multiplied by τ."""
    h, g = draw(N, 9) + 3, draw(N, 9, seed=1)
    v = ff.transport(h, g, prior=ff.Cauchy(0.3), rank=rank, rule=RULES[rule], repulsion=repulsion)
    naive = reference.transport(h, g, reference.cauchy(0.3), rank=rank, rule=rule, repulsion=repulsion)
    assert_close(v, naive, rtol=1e-10, atol=1e-10)


def test_one_is_the_paper_to_the_bit_and_zero_is_map():
    h, g = draw(N, 9) + 3, draw(N, 9, seed=1)
    default = ff.transport(h, g, prior=ff.Cauchy(0.3), rank=2)
    assert torch.equal(ff.transport(h, g, prior=ff.Cauchy(0.3), rank=2, repulsion=1.0), default)
    no_repulsion = ff.transport(h, g, prior=ff.Cauchy(0.3), rank=2, repulsion=0.0)
    assert torch.equal(no_repulsion, ff.transport(h, g, prior=ff.Cauchy(0.3), rule=ff.MAP()))


@pytest.mark.parametrize("repulsion", [4.0])
def test_particles_on_a_gaussian_settle_at_the_square_root_of_the_repulsion(repulsion):
    """With the median bandwidth, v for √τ x and repulsion τ is √τ times v for x and repulsion 1."""
    variance = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)

    def settled(start: torch.Tensor, tau: float) -> torch.Tensor:
        x = start
        for _ in range(1500):
            x = x + 0.2 * ff.transport(x, -x / variance, prior=ff.Uniform(), repulsion=tau)
        return x

    start = draw(6, 3)
    one, other = settled(start, 1.0), settled(math.sqrt(repulsion) * start, repulsion)
    assert ff.transport(one, -one / variance, prior=ff.Uniform()).norm() < 1e-6 * one.norm()
    assert_close(other, math.sqrt(repulsion) * one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan, "5", None])
def test_a_repulsion_that_is_not_a_finite_number_is_refused(bad):
    with pytest.raises(ValueError, match="repulsion must be a finite number of at least 0"):
        ff.transport(draw(2, 3), draw(2, 3), prior=ff.Uniform(), repulsion=bad)
    with pytest.raises(ValueError, match="repulsion must be"):
        ff.ParticleLayer(repulsion=bad)


# ---- batch size


def feature_gradient(features: torch.Tensor, head: nn.Module, y: torch.Tensor, **options: object) -> torch.Tensor:
    """v/B at each data point, times B: the direction of each data point."""
    h = features.clone().requires_grad_()
    layer = ff.ParticleLayer(ff.Cauchy(0.1), **options)
    F.cross_entropy(head(layer(h)).flatten(0, 1), y.repeat(len(h))).backward()
    assert h.grad is not None
    return -h.grad * features.shape[1]


@pytest.mark.parametrize("rank", [None, 2])
def test_a_reference_batch_keeps_the_strength_per_example(rank):
    """A batch that is repeated k times: the same direction for each example with a reference batch, and a repulsion k
    times as weak without."""
    torch.manual_seed(0)
    head, y, features = nn.Linear(H, C).double(), torch.tensor([0, 1, 2, 0, 1, 2]), draw(N, B, H) + 2
    once = feature_gradient(features, head, y, rank=rank, repulsion=5.0, reference_batch=B)
    free = feature_gradient(features, head, y, rank=rank, repulsion=0.0)
    assert_close(feature_gradient(features, head, y, rank=rank, repulsion=5.0), once)
    for k in (2, 5):
        repeated, labels = features.repeat(1, k, 1), y.repeat(k)
        kept = feature_gradient(repeated, head, labels, rank=rank, repulsion=5.0, reference_batch=B)
        assert_close(kept, once.repeat(1, k, 1))
        weak = feature_gradient(repeated, head, labels, rank=rank, repulsion=5.0)
        assert_close(weak - free.repeat(1, k, 1), (once - free).repeat(1, k, 1) / k)


def test_weights_have_no_reference_batch():
    with pytest.raises(ValueError, match="WeightWGD has no reference_batch"):
        WeightWGD(reference_batch=32).build(lambda: nn.Linear(H, H), lambda: nn.Linear(H, C), members=2, train_size=9)


# ---- losses of any scale


def make_parts() -> tuple[nn.ModuleList, nn.Module, ff.ParticleLayer]:
    torch.manual_seed(1)
    extractors = nn.ModuleList(nn.Linear(H, H).double() for _ in range(N))
    return extractors, nn.Linear(H, C).double(), ff.ParticleLayer(ff.Cauchy(0.1), rank=2, repulsion=3.0)


def gradients(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad.clone() for m in modules for p in m.parameters()]


def update(factor: float, micro_batches: int = 1, scaler: float = 1.0) -> list[torch.Tensor]:
    extractors, head, layer = make_parts()
    x, y = draw(B, H, seed=3), torch.arange(B) % C
    for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        features = torch.stack([f(xs) for f in extractors])
        loss = ff.particle_loss(features, lambda h, ys=ys: F.cross_entropy(head(h).flatten(0, 1), ys.repeat(N)), layer)
        (factor * loss * scaler).backward()
    return [g / scaler for g in gradients([extractors, head])]


@pytest.mark.parametrize("factor", [1e-4, 0.5, 65536.0, -2.0])
def test_a_particle_loss_may_have_any_factor(factor):
    for scaled, plain in zip(update(factor), update(1.0), strict=True):
        assert_close(scaled, factor * plain)


def test_a_particle_loss_times_zero_has_no_gradient():
    assert all(not g.any() for g in update(0.0))


def test_a_particle_loss_is_the_mean_loss_and_has_the_gradient_of_the_layer():
    extractors, head, layer = make_parts()
    x, y = draw(B, H, seed=3), torch.arange(B) % C
    features = torch.stack([f(x) for f in extractors])
    loss = F.cross_entropy(head(layer(features)).flatten(0, 1), y.repeat(N))
    loss.backward()
    for ours, plain in zip(update(1.0), gradients([extractors, head]), strict=True):
        assert_close(ours, plain)
    extractors, head, layer = make_parts()
    features = torch.stack([f(x) for f in extractors])
    ours = ff.particle_loss(features, lambda h: F.cross_entropy(head(h).flatten(0, 1), y.repeat(N)), layer)
    assert ours.item() == loss.item()


def test_accumulated_micro_batches_are_the_mean_of_their_updates():
    def alone(part: int) -> list[torch.Tensor]:
        extractors, head, layer = make_parts()
        x, y = draw(B, H, seed=3).chunk(2)[part], (torch.arange(B) % C).chunk(2)[part]
        h = torch.stack([f(x) for f in extractors])
        F.cross_entropy(head(layer(h)).flatten(0, 1), y.repeat(N)).backward()
        return gradients([extractors, head])

    for accumulated, first, second in zip(update(0.5, micro_batches=2), alone(0), alone(1), strict=True):
        assert_close(accumulated, (first + second) / 2)


@pytest.mark.parametrize("method", [FeatureWGD(repulsion=5.0), FunctionWGD(repulsion=5.0), WeightWGD(), FeatureMAP()])
@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
def test_the_loss_of_a_method_may_be_scaled_accumulated_and_unscaled(method, execution):
    """As gradient accumulation and a GradScaler do."""
    x, y = draw(B, H, seed=3, dtype=torch.float32), torch.arange(B) % C

    def gradient(factors: list[float]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        ens = method.build(
            lambda: nn.Linear(H, H), lambda: nn.Linear(H, C), members=3, train_size=B, execution=execution
        )
        for factor in factors:
            (factor * method.loss(ens, x, y).loss).backward()
        return [p.grad for p in ens.parameters()]

    plain = gradient([1.0])
    for factors, total in (([0.25, 0.75], 1.0), ([1024.0], 1024.0)):
        for ours, theirs in zip(gradient(factors), plain, strict=True):
            assert_close(ours / total, theirs, rtol=1e-4, atol=1e-6)


def test_a_grad_scaler_needs_no_setting_of_the_layer():
    x, y = draw(B, H, seed=3, dtype=torch.float32), torch.arange(B) % C

    def weights(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
        ens = FeatureWGD(repulsion=5.0).build(lambda: nn.Linear(H, H), lambda: nn.Linear(H, C), members=3)
        optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
        scaler.scale(FeatureWGD().loss(ens, x, y).loss).backward()
        scaler.step(optimiser)
        scaler.update()
        return [p.detach() for p in ens.parameters()]

    with_scaler = weights(torch.amp.GradScaler("cpu", init_scale=4096.0))
    for ours, plain in zip(with_scaler, weights(torch.amp.GradScaler("cpu", enabled=False)), strict=True):
        assert_close(ours, plain)


def test_the_bare_layer_still_needs_its_scale():
    """What `particle_loss` is there for: half the loss behind the bare layer is not half the update."""
    features, y = (draw(N, B, H) + 2).requires_grad_(), torch.arange(B) % C
    head = nn.Linear(H, C).double()

    def gradient(scale: float) -> torch.Tensor:
        layer = ff.ParticleLayer(ff.Cauchy(0.1), rank=2, repulsion=3.0, scale=scale)
        loss = 0.5 * F.cross_entropy(head(layer(features)).flatten(0, 1), y.repeat(N))
        return torch.autograd.grad(loss, features)[0]

    layer = ff.ParticleLayer(ff.Cauchy(0.1), rank=2, repulsion=3.0)
    plain = torch.autograd.grad(F.cross_entropy(head(layer(features)).flatten(0, 1), y.repeat(N)), features)[0]
    assert_close(gradient(0.5), plain / 2)
    assert not torch.allclose(gradient(1.0), plain / 2, rtol=0.05)


# ---- saved ensembles


def test_a_saved_ensemble_keeps_its_repulsion(tmp_path):
    ens = FeatureWGD(repulsion=5.0, reference_batch=32).build(
        lambda: nn.Linear(H, H), lambda: nn.Linear(H, C), members=3
    )
    ff.save(ens, tmp_path / "ens")
    layer = ff.load(tmp_path / "ens").layer
    assert (layer.repulsion, layer.reference_batch) == (5.0, 32)
    assert "repulsion=5.0, reference_batch=32" in repr(layer)


# ---- several processes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_part_of_the_batch_is_warned_about_on_every_device(device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    features, layer = torch.zeros(N, B, H, device=device, requires_grad=True), ff.ParticleLayer()
    with pytest.warns(UserWarning, match="only this process's part of the batch"):
        layer(features)
    layer.sees_whole_batch = True
    layer(features)  # warnings are errors in these tests
