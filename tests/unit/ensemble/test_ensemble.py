"""Ensemble: logits, predictions and uncertainty, and that the three execution modes agree."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff

N, B, H, C = 4, 6, 5, 3
EXECUTIONS = ("sequential", "vectorised", "low_memory")


class Net(nn.Module):
    """A user's module: convolution, BatchNorm, dropout, a residual connection and a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(4, H)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps = self.steps + 1
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.out(self.drop(x + x.flip(-1)).mean((-2, -1)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 2, 4, 4, generator=generator), torch.arange(B) % C


def build(at: str = "features", dropout: float = 0.0, execution: str = "sequential") -> ff.Ensemble:
    torch.manual_seed(0)
    extractors = [Net(dropout) for _ in range(N)]
    heads = [nn.Linear(H, C) for _ in range(N)]
    layer = ff.ParticleLayer(ff.Cauchy(0.1), rank=3, count=100 if at == "weights" else None)
    return ff.Ensemble(extractors, heads[0] if at == "features" else heads, layer, at=at, execution=execution)


def step(ens: ff.Ensemble) -> None:
    x, y = data()
    F.cross_entropy(ens(x).flatten(0, 1), y.repeat(len(ens))).backward()


def test_logits_of_a_shared_head_and_of_one_head_per_member():
    x, _ = data()
    shared, own = build().eval(), build("logits").eval()
    assert_close(shared(x), torch.stack([shared.head(f(x)) for f in shared.extractors]))
    assert_close(own(x), torch.stack([h(f(x)) for f, h in zip(own.extractors, own.head, strict=True)]))
    assert_close(shared.features(x), torch.stack([f(x) for f in shared.extractors]))
    assert len(shared) == N


def test_a_shared_head_can_be_a_deep_part_of_the_network():
    torch.manual_seed(0)
    stems = [nn.Conv2d(2, 4, 3) for _ in range(N)]
    tail = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, C))
    ens = ff.Ensemble(stems, tail, ff.ParticleLayer(ff.Normal(0.1), rank=2))
    x, y = data()
    assert ens(x).shape == (N, B, C)
    step(ens)
    # Naively: features as leaves, the reference direction, then back through each stem.
    maps = torch.stack([f(x) for f in stems]).detach().requires_grad_()
    log_p = copy.deepcopy(tail)(maps.flatten(0, 1).clone()).log_softmax(-1)
    g = torch.autograd.grad(log_p.gather(1, y.repeat(N)[:, None]).sum(), maps)[0]
    v = ff.transport(maps.detach().flatten(1), g.flatten(1), prior=ff.Normal(0.1), rank=2).view_as(maps)
    for i, f in enumerate(stems):
        expected = torch.autograd.grad(f(x), f.weight, -v[i] / B)[0]
        assert_close(f.weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_predict_averages_probabilities_not_logits():
    ens = build()
    x, _ = data()
    expected = copy.deepcopy(ens).eval()(x).softmax(-1).mean(0)
    assert_close(ens.predict(x), expected)
    assert_close(ens.predict(x).sum(-1), torch.ones(B))


def test_predict_and_uncertainty_leave_modes_gradients_and_statistics_alone():
    ens = build(dropout=0.5)
    ens.extractors[1].norm.eval()
    before = copy.deepcopy(ens.state_dict())
    first = ens.predict(data()[0])
    assert not first.requires_grad
    assert torch.equal(first, ens.predict(data()[0]))
    ens.uncertainty(data()[0])
    assert ens.training
    assert ens.extractors[1].drop.training
    assert not ens.extractors[1].norm.training
    for name, tensor in ens.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Fixed(nn.Module):
    """An extractor whose "features" are given log-probabilities."""

    def __init__(self, probs: list[float]) -> None:
        super().__init__()
        self.register_buffer("log_p", torch.tensor(probs).log())

    def forward(self, x):
        return self.log_p.expand(len(x), -1)


def test_uncertainty_of_known_predictions():
    x = torch.zeros(2, 1)

    def parts(*members: list[float]) -> list[float]:
        ens = ff.Ensemble([Fixed(p) for p in members], nn.Identity())
        return [float(part[0]) for part in ens.uncertainty(x)]

    # Confident members that disagree: all uncertainty is epistemic.
    assert parts([1, 0], [0, 1]) == pytest.approx([math.log(2), 0, math.log(2)], abs=1e-6)
    # Uncertain members that agree: none is.
    assert parts([0.5, 0.5], [0.5, 0.5]) == pytest.approx([math.log(2), math.log(2), 0], abs=1e-6)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    total = -0.7 * math.log(0.7) - 0.3 * math.log(0.3)
    expected = (entropy + math.log(2)) / 2
    assert parts([0.9, 0.1], [0.5, 0.5]) == pytest.approx([total, expected, total - expected], abs=1e-6)


def test_uncertainty_adds_up_and_is_never_negative():
    u = build().uncertainty(data()[0])
    assert_close(u.total, u.aleatoric + u.epistemic)
    assert min(u.epistemic.min(), u.aleatoric.min()) >= 0


@pytest.mark.parametrize("at", ["features", "logits", "weights"])
@pytest.mark.parametrize("execution", ["vectorised", "low_memory"])
def test_execution_modes_agree(at, execution):
    one, other = build(at), build(at, execution=execution)
    optimisers = [torch.optim.SGD(e.parameters(), lr=0.1, momentum=0.9) for e in (one, other)]
    for _ in range(3):
        for ens, optimiser in zip((one, other), optimisers, strict=True):
            optimiser.zero_grad()
            step(ens)
            optimiser.step()
    exact = {"rtol": 0, "atol": 0} if execution == "low_memory" else {"rtol": 1e-3, "atol": 1e-5}
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert_close(b, a, **exact, msg=lambda m, name=name: f"{name}: {m}")
        assert_close(b.grad, a.grad, **exact)
    for (name, a), b in zip(one.named_buffers(), other.buffers(), strict=True):
        assert_close(b, a, **exact, msg=lambda m, name=name: f"{name}: {m}")
    assert int(other.extractors[2].norm.num_batches_tracked) == 3
    assert float(other.extractors[2].steps) == 3
    assert_close(other.predict(data()[0]), one.predict(data()[0]), rtol=1e-4, atol=1e-6)


def test_running_statistics_belong_to_each_member():
    ens = build(execution="vectorised")
    step(ens)
    for member in ens.extractors:
        x = member.conv(data()[0])
        assert_close(member.norm.running_mean, 0.1 * x.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
        assert_close(member.norm.running_var, 0.9 + 0.1 * x.transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(ens.extractors[0].norm.running_mean, ens.extractors[1].norm.running_mean)


def test_a_cumulative_average_of_statistics_is_right_for_each_member():
    """BatchNorm(momentum=None) converts a buffer to a Python number."""
    results = []
    for execution in EXECUTIONS:
        torch.manual_seed(0)
        members = [nn.Sequential(nn.Linear(2, H), nn.BatchNorm1d(H, momentum=None)) for _ in range(N)]
        ens = ff.Ensemble(members, nn.Linear(H, C), execution=execution)
        for seed in range(3):
            x = torch.randn(B, 2, generator=torch.Generator().manual_seed(seed))
            ens(x)
        results.append([m[1].running_var for m in members] + [m[1].num_batches_tracked for m in members])
    for other in results[1:]:
        assert_close(other, results[0])


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_deep_shared_head_in_all_execution_modes(batch_norm):
    """With BatchNorm it sees all members as one batch, and its statistics are updated once."""
    results = []
    for execution in EXECUTIONS:
        torch.manual_seed(0)
        tail = [nn.Linear(H, 8), nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8), nn.ReLU(inplace=True)]
        ens = ff.Ensemble(
            [Net() for _ in range(N)], nn.Sequential(*tail, nn.Linear(8, C)), ff.ParticleLayer(), execution=execution
        )
        step(ens)
        results.append([p.grad for p in ens.parameters()] + list(ens.buffers()))
        if batch_norm:
            assert int(ens.head[1].num_batches_tracked) == 1
            rows = ens.head[0](torch.stack([copy.deepcopy(f)(data()[0]) for f in ens.extractors]).flatten(0, 1))
            assert_close(ens.head[1].running_mean, 0.1 * rows.mean(0), rtol=1e-4, atol=1e-5)
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-3, atol=1e-5)


def test_low_memory_uses_the_same_dropout_masks():
    grads, buffers = [], []
    for execution in ("sequential", "low_memory"):
        ens = build(dropout=0.5, execution=execution)
        ens.head = nn.Sequential(nn.Dropout(0.5), ens.head, nn.Dropout(0.5))
        torch.manual_seed(5)
        step(ens)
        after = torch.rand(1)
        grads.append([p.grad for p in ens.parameters()] + [after])
        buffers.append(list(ens.buffers()))
    for a, b in zip(grads[0] + buffers[0], grads[1] + buffers[1], strict=True):
        assert torch.equal(a, b)


def test_low_memory_stores_the_activations_of_one_member():
    """Autograd stores no activation of the others between the forward and the backward pass."""

    def held(execution: str, members: int = N) -> int:
        ens, kept = build(execution=execution), {}
        ens = ff.Ensemble(list(ens.extractors)[:members], ens.head, ff.ParticleLayer(), execution=execution)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
            ens(data()[0])
        return sum(t.numel() for t in kept.values())

    inside = 4 * 4 * 4 * B  # one activation of one member
    assert held("sequential") > N * 2 * inside
    assert held("low_memory") < held("sequential", members=1) + inside


def test_low_memory_computes_every_member_but_the_last_twice():
    """The last is the first whose gradients are computed, so that the activations of two never exist together."""
    ens, calls = build(execution="low_memory"), []
    for i, member in enumerate(ens.extractors):
        member.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
        next(member.parameters()).register_post_accumulate_grad_hook(lambda p, i=i: calls.append(f"gradient {i}"))
    step(ens)
    backward = [call for i in reversed(range(N - 1)) for call in (i, f"gradient {i}")]
    assert calls == [*range(N), f"gradient {N - 1}", *backward]


def test_vectorised_dropout_differs_between_members():
    torch.manual_seed(0)
    member = Net(dropout=0.5)
    ens = ff.Ensemble([copy.deepcopy(member) for _ in range(N)], nn.Linear(H, C), execution="vectorised")
    h = ens.features(data()[0])
    assert not torch.allclose(h[0], h[1])


def test_members_can_differ_unless_they_are_stacked():
    ens = ff.Ensemble([nn.Linear(2, 3), nn.Linear(2, 7)], [nn.Linear(3, C), nn.Linear(7, C)])
    assert ens(torch.randn(B, 2)).shape == (2, B, C)
    with pytest.raises(ValueError, match=r"same shape; member 0 gives \(6, 3\), member 1 \(6, 7\)"):
        ens.features(torch.randn(B, 2))


def test_weights_move_along_the_scaled_direction():
    """weight-WGD written out: v/N for the data gradient of all N points."""
    ens, (x, y) = build("weights"), data()
    ens.double()
    x = x.double()
    F.cross_entropy(ens(x).flatten(0, 1), y.repeat(N)).backward()
    reference_ens = build("weights").double()
    pairs = zip(reference_ens.extractors, reference_ens.head, strict=True)
    members = [[*f.parameters(), *h.parameters()] for f, h in pairs]
    rows = []
    for f, h, weights in zip(reference_ens.extractors, reference_ens.head, members, strict=True):
        log_lik = -F.cross_entropy(h(f(x)), y, reduction="sum") * 100 / B
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(log_lik, weights)]))
    w = torch.stack([torch.cat([p.detach().flatten() for p in weights]) for weights in members])
    v = ff.transport(w, torch.stack(rows), prior=ff.Cauchy(0.1), rank=3)
    for i, (f, h) in enumerate(zip(ens.extractors, ens.head, strict=True)):
        grad = torch.cat([p.grad.flatten() for p in [*f.parameters(), *h.parameters()]])
        assert_close(grad, -v[i] / 100)


def test_frozen_weights_are_not_particles():
    ens = build("weights").requires_grad_(False)
    assert ens(data()[0]).shape == (N, B, C)
    ens.requires_grad_(True)
    for member in ens.extractors:
        member.conv.requires_grad_(False)
    step(ens)
    assert ens.extractors[0].conv.weight.grad is None
    assert ens.extractors[0].out.weight.grad is not None


class Scaled(nn.Linear):
    """Members differ in a plain attribute that repr does not show."""

    def __init__(self, factor: float) -> None:
        super().__init__(H, H)
        self.factor = factor

    def forward(self, x):
        return self.factor * super().forward(x)


def share_a_norm() -> list[nn.Module]:
    norm = nn.BatchNorm1d(H)
    return [nn.Sequential(nn.Linear(H, H), norm) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ff.Ensemble([], nn.Linear(H, C)), "at least one extractor"),
        (lambda: ff.Ensemble([Net()] * 2, nn.Linear(H, C)), "same extractor was given twice"),
        (lambda: ff.Ensemble([Net(), Net()], [nn.Linear(H, C)]), "2 extractors need as many heads"),
        (lambda: ff.Ensemble([Net(), Net()], [nn.Linear(H, C)] * 2), "same head was given twice"),
        (lambda: ff.Ensemble([Net()], nn.Linear(H, C), at="loss"), "at must be"),
        (lambda: ff.Ensemble([Net()], nn.Linear(H, C), execution="fast"), "execution must be"),
        (lambda: ff.Ensemble([Net()], [nn.Linear(H, C)], ff.ParticleLayer(), at="weights"), "count=N"),
        (lambda: ff.Ensemble([Net()], nn.Linear(H, C), ff.ParticleLayer(count=9), at="weights"), "one head per member"),
        (
            lambda: ff.Ensemble(
                [nn.Linear(2, H), nn.Linear(2, H, bias=False)], nn.Linear(H, C), execution="vectorised"
            ),
            "one architecture; member 1 differs",
        ),
        (lambda: ff.Ensemble([Net(0.1), Net(0.2)], nn.Linear(H, C), execution="vectorised"), "one architecture"),
        (lambda: ff.Ensemble([Scaled(1.0), Scaled(5.0)], nn.Linear(H, C), execution="vectorised"), "member 1 differs"),
        (lambda: ff.Ensemble(share_a_norm(), nn.Linear(H, C), execution="vectorised"), "members 0 and 1 do"),
        (
            lambda: ff.Ensemble([Net()], nn.Linear(H, C), layer=ff.ParticleLayer),
            "must be a module, such as ParticleLayer",
        ),
    ],
)
def test_error_messages(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_modules_that_cannot_be_vectorised_raise():
    ens = build(execution="vectorised")
    ens.extractors[1].eval()
    with pytest.raises(ValueError, match="same train or eval mode"):
        ens(data()[0])

    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.bias.sum() > 0 else x

    ens = ff.Ensemble([Branches(H, H), Branches(H, H)], nn.Linear(H, C), execution="vectorised")
    with pytest.raises(ValueError, match=r'cannot be vectorised\. Use execution="sequential"'):
        ens(torch.randn(B, H))
    ens = ff.Ensemble([nn.Sequential(nn.GRU(H, H)) for _ in range(2)], nn.Linear(H, C), execution="vectorised")
    with pytest.raises(ValueError, match=r'cannot be vectorised\. Use execution="sequential"'):
        ens(torch.randn(B, H))


def test_weights_that_are_used_twice_in_a_member_are_vectorised():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).tanh())

    grads = []
    for execution in ("sequential", "vectorised"):
        torch.manual_seed(0)
        ens = ff.Ensemble([Tied() for _ in range(N)], nn.Linear(H, C), execution=execution)
        ens(torch.randn(B, H)).square().sum().backward()
        grads.append([p.grad for p in ens.parameters()])
    assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
