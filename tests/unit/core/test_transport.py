"""`transport` against the naive reference, closed forms, invariances and the authors' code."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import featureflock as ff

GOLDEN = Path(__file__).parents[2] / "golden" / "official_code.npz"
RULES = {"WGD": ff.WGD(), "SVGD": ff.SVGD(), "SteinWGD": ff.SteinWGD()}
PRIORS = {
    "cauchy": (ff.Cauchy(0.3), reference.cauchy(0.3)),
    "normal": (ff.Normal(0.3), reference.normal(0.3)),
    "uniform": (ff.Uniform(), reference.uniform()),
}


def draw(n: int, d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h, g = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    return h + 3, g  # with a large common part, like features after a ReLU


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bandwidth", ["median", "official", 7.0])
@pytest.mark.parametrize(("rank", "subspace"), [(None, "dominant"), (1, "dominant"), (3, "dominant"), (2, "weakest")])
def test_matches_the_naive_reference(prior, rule, bandwidth, rank, subspace):
    h, g = draw(5, 12)
    ours, log_density = PRIORS[prior]
    v = ff.transport(h, g, prior=ours, kernel=ff.RBF(bandwidth), rank=rank, subspace=subspace, rule=RULES[rule])
    naive = reference.transport(h, g, log_density, bandwidth=bandwidth, rank=rank, subspace=subspace, rule=rule)
    assert_close(v, naive, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 9), d=st.integers(2, 40), seed=st.integers(0, 10_000), data=st.data())
def test_matches_the_naive_reference_for_any_size(n, d, seed, data):
    rank = data.draw(st.none() | st.integers(1, max(1, min(n, d) - 1)))
    h, g = draw(n, d, seed)
    v = ff.transport(h, g, prior=ff.Cauchy(1e-3), rank=rank)
    assert_close(v, reference.transport(h, g, reference.cauchy(1e-3), rank=rank), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", [0, 1, 2])
def test_reproduces_the_authors_code(case):
    with np.load(GOLDEN) as golden:
        h, w, b, y = (torch.from_numpy(golden[f"{case}/{k}"]) for k in ("h", "W", "b", "y"))
        grad, grad_w, grad_b = (torch.from_numpy(golden[f"{case}/{k}"]) for k in ("grad", "gW", "gb"))
        n, _, _, _, rank, precision, prior = golden[f"{case}/meta"]
    for x in (h, w, b):
        x.requires_grad_()
    layer = ff.ParticleLayer(
        prior=ff.Normal(precision) if prior else ff.Cauchy(precision),
        kernel=ff.RBF("official"),
        rank=int(rank),
        subspace="weakest",
    )
    F.cross_entropy((layer(h) @ w + b).flatten(0, 1), y.repeat(int(n))).backward()
    for ours, theirs in ((h.grad, grad), (w.grad, grad_w), (b.grad, grad_b)):
        assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_two_particles_are_pushed_apart_by_the_closed_form():
    # ℓ = Δ²/log 2, k = 1/2, so the repulsion is (2/ℓ) k Δ / (1 + k) = (2/3) log 2 / Δ, away from the other.
    h = torch.tensor([[0.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    v = ff.transport(h, torch.zeros_like(h), prior=ff.Uniform())
    push = 2 / 3 * math.log(2) / 4
    assert_close(v, torch.tensor([[0.0, -push], [0.0, push]], dtype=torch.float64))


def test_repels_only_in_the_span_of_the_dominant_directions():
    h, _ = draw(4, 6)
    g = torch.zeros_like(h)
    g[:, 2], g[0, 5] = 10.0, 1e-3
    repulsion = ff.transport(h, g, prior=ff.Uniform(), rank=1) - g
    assert repulsion[:, 2].abs().min() > 1e-2
    assert_close(repulsion[:, [0, 1, 3, 4]], torch.zeros(4, 4, dtype=torch.float64))
    weakest = ff.transport(h, g, prior=ff.Uniform(), rank=1, subspace="weakest") - g
    assert weakest[:, 5].abs().max() > 1e-2
    assert weakest[:, 2].abs().max() < 1e-3


def test_full_rank_projection_repels_as_much_as_none_when_particles_lie_in_the_span():
    _, g = draw(4, 9)
    mix = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h = mix @ g
    assert_close(ff.transport(h, g, prior=ff.Uniform(), rank=4), ff.transport(h, g, prior=ff.Uniform()))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("rule", RULES.values())
def test_symmetries(rank, rule):
    def direction(h, g):
        return ff.transport(h, g, prior=ff.Uniform(), rank=rank, rule=rule)

    h, g = draw(5, 8)
    v = direction(h, g)
    assert_close(direction(h + torch.randn(8, dtype=h.dtype), g), v)  # only differences of particles matter
    order = torch.tensor([3, 1, 4, 0, 2])
    assert_close(direction(h[order], g[order]), v[order])
    rotation, _ = torch.linalg.qr(torch.randn(8, 8, dtype=h.dtype, generator=torch.Generator().manual_seed(2)))
    assert_close(direction(h @ rotation, g @ rotation), v @ rotation)


def test_repulsion_shrinks_as_particles_spread_and_ignores_the_size_of_gradients():
    h, g = draw(5, 8)
    repulsion = ff.transport(h, g, prior=ff.Uniform(), rank=3) - g
    assert_close(ff.transport(10 * h, g, prior=ff.Uniform(), rank=3) - g, repulsion / 10)
    assert_close(ff.transport(h, 1e-9 * g, prior=ff.Uniform(), rank=3) - 1e-9 * g, repulsion)


@pytest.mark.parametrize("rule", RULES.values())
def test_moves_particles_to_the_posterior(rule):
    """Many steps on a Gaussian log-likelihood with mean 2 and precision 1, in one dimension."""
    x = torch.linspace(-3, 0, 30, dtype=torch.float64)[:, None]
    for _ in range(2000):
        x = x + 0.05 * ff.transport(x, 2 - x, prior=ff.Uniform(), rule=rule)
    assert x.mean().item() == pytest.approx(2, abs=0.05)
    assert 0.5 < x.var().item() < 1.3  # kernel estimates are too narrow for finite n, but nothing collapses


def test_map_is_gradient_plus_prior_score():
    h, g = draw(5, 8)
    assert_close(ff.transport(h, g, prior=ff.Normal(0.1), rank=2, rule=ff.MAP()), g - 0.1 * h)


# Langevin noise


@pytest.mark.parametrize("rule", [ff.WGD, ff.SteinWGD, ff.MAP])
def test_langevin_noise_has_the_variance_of_a_step(rule):
    torch.manual_seed(0)
    h, g = draw(3, 200_000)
    still = ff.transport(h, g, prior=ff.Uniform(), rule=rule())
    noise = ff.transport(h, g, prior=ff.Uniform(), rule=rule(noise=0.3, step_size=0.1)) - still
    assert_close(noise @ noise.T / noise.shape[1], 2 * 0.3 / 0.1 * torch.eye(3, dtype=h.dtype), rtol=0.02, atol=0.05)


def test_svgd_noise_has_covariance_k_across_particles():
    torch.manual_seed(0)
    h, g = draw(4, 100_000)
    width = float((h[0] - h[1]).square().sum())
    k = torch.exp(-(torch.cdist(h, h) ** 2) / width)
    kernel = ff.RBF(width)
    still = ff.transport(h, g, prior=ff.Uniform(), kernel=kernel, rule=ff.SVGD())
    noise = ff.transport(h, g, prior=ff.Uniform(), kernel=kernel, rule=ff.SVGD(noise=0.5)) - still
    assert_close(noise @ noise.T / noise.shape[1], k, rtol=0.02, atol=0.02)


# Limits


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize("bandwidth", ["median", "official", 2.0])
@pytest.mark.parametrize("rank", [None, 1])
def test_one_particle_has_no_repulsion(rule, bandwidth, rank):
    h, g = draw(1, 7)
    v = ff.transport(h, g, prior=ff.Normal(0.2), kernel=ff.RBF(bandwidth), rank=rank, rule=rule)
    assert_close(v, g - 0.2 * h)


@pytest.mark.parametrize("bandwidth", ["median", "official", 2.0])
@pytest.mark.parametrize("rank", [None, 3])
def test_coinciding_particles_do_not_repel(bandwidth, rank):
    h, g = draw(5, 7)
    h[:] = h[2].clone() / 3
    assert_close(ff.transport(h, g, prior=ff.Uniform(), kernel=ff.RBF(bandwidth), rank=rank), g)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_bandwidth_of_zero_gives_no_repulsion(rank):
    h, g = draw(6, 7)
    h[1:] = h[1].clone() / 3  # more than half of all pairs coincide, so the median distance is 0
    assert_close(ff.transport(h, g, prior=ff.Uniform(), rank=rank), g)


@pytest.mark.parametrize("rank", [None, 3])
def test_particles_that_coincide_up_to_rounding_do_not_repel(rank):
    h, g = draw(9, 7)
    h[[1, 2, 3, 5, 6, 7, 8]] = h[1].clone() / 3
    assert_close(ff.transport(h, g, prior=ff.Uniform(), rank=rank), g)


@pytest.mark.parametrize("outlier", [0, 3, 5])
@pytest.mark.parametrize("rank", [None, 4])
def test_an_outlier_does_not_reduce_precision(outlier, rank):
    h, g = draw(6, 30)
    h = (h - 3) * 1e-5
    h[outlier] += torch.randn(30, dtype=h.dtype, generator=torch.Generator().manual_seed(1))
    v = ff.transport(h, g, prior=ff.Uniform(), rank=rank)
    naive = reference.transport(h, g, reference.uniform(), rank=rank)
    assert_close(v, naive, rtol=1e-8, atol=1e-8 * float(naive.abs().max()))


def test_tiny_and_huge_distances_give_finite_values():
    h, g = draw(4, 5)
    for scale in (1e-200, 1e-155, 1e-100, 1e-30, 1e30, 1e100):
        assert ff.transport((h - 3) * scale, g, prior=ff.Uniform()).isfinite().all()


def test_coinciding_particles_feel_the_same_force_from_others():
    h, g = draw(4, 7)
    h[1] = h[0]
    repulsion = ff.transport(h, g, prior=ff.Uniform(), rank=3) - g
    assert_close(repulsion[0], repulsion[1])
    assert_close(repulsion + g, reference.transport(h, g, reference.uniform(), rank=3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("subspace", ["dominant", "weakest"])
def test_without_gradients_there_is_no_direction_to_repel_in(subspace):
    h, _ = draw(4, 7)
    v = ff.transport(h, torch.zeros_like(h), prior=ff.Normal(0.1), rank=2, subspace=subspace)
    assert_close(v, -0.1 * h)


@pytest.mark.parametrize("subspace", ["dominant", "weakest"])
def test_missing_directions_are_left_out(subspace):
    h, g = draw(6, 9)
    g[2:] = g[:2].repeat(2, 1) * torch.tensor([2.0, -1, 0.5, 3], dtype=g.dtype)[:, None]  # two directions
    v = ff.transport(h, g, prior=ff.Uniform(), rank=5, subspace=subspace)
    assert_close(v, ff.transport(h, g, prior=ff.Uniform(), rank=2, subspace=subspace), rtol=1e-9, atol=1e-9)
    assert_close(v, reference.transport(h, g, reference.uniform(), rank=5), rtol=1e-9, atol=1e-9)


def test_more_particles_than_dimensions():
    h, g = draw(9, 3)
    v = ff.transport(h, g, prior=ff.Uniform(), rank=9)
    assert_close(v, reference.transport(h, g, reference.uniform(), rank=9), rtol=1e-9, atol=1e-9)


# Precision and layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [None, 3])
def test_algebra_is_in_float64_for_any_dtype(dtype, rank):
    h, g = draw(5, 300)
    h, g = h.to(dtype), g.to(dtype)
    exact = ff.transport(h.double(), g.double(), prior=ff.Cauchy(0.1), rank=rank)
    v = ff.transport(h, g, prior=ff.Cauchy(0.1), rank=rank)
    assert v.dtype == dtype
    assert_close(v, exact.to(dtype), rtol=0, atol=0)


def test_a_member_with_tiny_gradients_still_counts_in_float32():
    h, g = draw(4, 50)
    g[3] *= 1e-5
    v = ff.transport(h.float(), g.float(), prior=ff.Uniform(), rank=4)
    naive = reference.transport(h.float().double(), g.float().double(), reference.uniform(), rank=4)
    assert_close(v.double(), naive, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 3])
def test_the_result_does_not_depend_on_the_slice_size(rank, monkeypatch):
    h, g = draw(5, 101)
    whole = ff.transport(h, g, prior=ff.Cauchy(0.1), rank=rank)
    monkeypatch.setattr(importlib.import_module("featureflock.core.transport"), "_SLICE_SIZE", 5 * 13)
    assert_close(ff.transport(h, g, prior=ff.Cauchy(0.1), rank=rank), whole)
    assert_close(ff.transport(h.T.contiguous().T, g.T.contiguous().T, prior=ff.Cauchy(0.1), rank=rank), whole)


@pytest.mark.parametrize(("device", "most", "slices"), [("cpu", 2**16, 800), ("meta", 2**24, 4)])
def test_slices_fit_the_device(device, most, slices):
    """100 members, 256 examples, 2,048 features: few kernels on a GPU, slices that fit the cache on a CPU."""
    module = importlib.import_module("featureflock.core.transport")
    h = torch.empty(100, 1, device=device).expand(100, 256 * 2048)
    sizes = [100 * (part.stop - part.start) for part, _, _ in module._slices(_Columns(h), _Columns(h), 1.0)]
    assert sum(sizes) == h.numel()
    assert max(sizes) <= most
    assert len(sizes) <= slices + 1


class _Columns:
    """A tensor whose slices have no values, so that they cost no memory."""

    def __init__(self, tensor):
        self.shape, self.device, self.tensor = tensor.shape, tensor.device, tensor.to("meta")

    def __getitem__(self, index):
        return self.tensor[index]


def test_user_defined_prior_and_kernel():
    class Laplace:
        def score(self, x):
            return -x.sign()

    def inverse_multiquadric(sq):
        k = (1 + sq).rsqrt()
        return k, -0.5 * k**3

    h, g = draw(4, 6)
    v = ff.transport(h, g, prior=Laplace(), kernel=inverse_multiquadric)
    for i in range(4):
        x = h[i].clone().requires_grad_()
        log_q = (1 + (x - h).square().sum(1)).rsqrt().sum().log()
        assert_close(v[i], g[i] - h[i].sign() - torch.autograd.grad(log_q, x)[0])


# Invalid input


@pytest.mark.parametrize(
    ("h", "g", "options", "words"),
    [
        (torch.zeros(3, 4, 5), torch.zeros(3, 4, 5), {}, r"\(n, d\)"),
        (torch.zeros(3, 4), torch.zeros(3, 5), {}, "loglik_grad has"),
        (torch.zeros(3, 0), torch.zeros(3, 0), {}, "at least one"),
        (torch.zeros(0, 3), torch.zeros(0, 3), {}, "at least one"),
        (torch.zeros(3, 4).int(), torch.zeros(3, 4).int(), {}, "floating-point"),
        (torch.zeros(3, 4), torch.zeros(3, 4), {"rank": 4}, "rank=4 exceeds the 3 members"),
        (torch.zeros(3, 4), torch.zeros(3, 4), {"rank": 0}, "at least 1"),
        (torch.zeros(3, 4), torch.zeros(3, 4), {"rank": 1.5}, "integer"),
        (torch.zeros(3, 4), torch.zeros(3, 4), {"subspace": "largest"}, "dominant"),
        (torch.zeros(3, 4).index_fill(0, torch.tensor([1]), math.nan), torch.zeros(3, 4), {}, "member 1 contain NaN"),
        (torch.zeros(3, 4), torch.zeros(3, 4).fill_(math.inf), {"rank": 2}, "loglik_grad of members 0, 1, 2"),
        (1e200 * torch.eye(2, 4).double(), torch.zeros(2, 4).double(), {}, "overflow"),
    ],
)
def test_error_messages(h, g, options, words):
    with pytest.raises(ValueError, match=words):
        ff.transport(h, g, **{"prior": ff.Uniform(), **options})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ff.Cauchy(-1),
        lambda: ff.Normal(math.nan),
        lambda: ff.RBF("mean"),
        lambda: ff.RBF(0),
        lambda: ff.RBF(math.inf),
        lambda: ff.RBF(None),
        lambda: ff.RBF(True),
        lambda: ff.Cauchy("1e-3"),
        lambda: ff.WGD(noise=None),
        lambda: ff.ParticleLayer(prior="cauchy"),
        lambda: ff.ParticleLayer(kernel="rbf"),
        lambda: ff.ParticleLayer(rule="WGD"),
        lambda: ff.ParticleLayer(count="5"),
        lambda: ff.WGD(noise=-1),
        lambda: ff.SVGD(step_size=0),
        lambda: ff.SteinWGD(eta=0),
        lambda: ff.ParticleLayer(kernel=ff.RBF("official"), rule=ff.SVGD(noise=1)),
    ],
)
def test_invalid_hyper_parameters_raise(make):
    with pytest.raises(ValueError, match=r"[a-z] .*\."):
        make()


def test_takes_tensors_only():
    with pytest.raises(ValueError, match="two tensors; got ndarray"):
        ff.transport(np.zeros((2, 3)), np.zeros((2, 3)), prior=ff.Uniform())


def test_numpy_integers_are_ranks():
    h, g = draw(4, 5)
    v = ff.transport(h, g, prior=ff.Uniform(), rank=np.int64(2))
    assert torch.equal(v, ff.transport(h, g, prior=ff.Uniform(), rank=2))


def test_has_no_autograd_graph_and_does_not_modify_its_input():
    h, g = draw(4, 5)
    copies = h.clone(), g.clone()
    v = ff.transport(h.requires_grad_(), g.requires_grad_(), prior=ff.Cauchy(), rank=2)
    assert not v.requires_grad
    assert torch.equal(h, copies[0])
    assert torch.equal(g, copies[1])
