"""Members side by side in threads: the same numbers as one after another, and nothing lost between threads."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff

N, B, H, C = 5, 6, 8, 3
THREADS = 2


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


class Member(nn.Module):
    """Convolution, BatchNorm, a parameter that is not used; it notes on which thread it was called."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, H, 3), nn.BatchNorm2d(H), nn.Dropout(p)
        self.unused = nn.Parameter(torch.zeros(2))
        self.called_on: list[tuple[str, int, bool]] = []

    def forward(self, x):
        self.called_on.append((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
        return self.drop(F.relu(self.norm(self.conv(x)))).mean((-2, -1))


def build(run: str, at: str = "features", p: float = 0.0) -> ff.Ensemble:
    torch.manual_seed(0)
    members = [Member(p) for _ in range(N)]
    layer = ff.ParticleLayer(ff.Cauchy(0.1), rank=3, count=100 if at == "weights" else None)
    head = nn.Linear(H, C) if at == "features" else [nn.Linear(H, C) for _ in range(N)]
    return ff.Ensemble(members, head, layer, at=at, run=run)


def pictures() -> torch.Tensor:
    return torch.randn(B, 2, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("at", ["features", "logits", "weights"])
def test_gradients_statistics_and_predictions_are_those_of_one_after_another(at):
    y = torch.arange(B) % C
    found = []
    for run in ("sequential", "threaded"):
        ens, x = build(run, at), pictures().requires_grad_()
        optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(ens(x).flatten(0, 1), y.repeat(N)).backward()
            optimiser.step()
        gradients = {name: p.grad for name, p in ens.named_parameters()}
        found.append((gradients, ens.state_dict(), x.grad, ens.predict(x)))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_members_have_a_thread_each_and_the_last_one_has_all():
    ens = build("threaded")
    ens(pictures())
    ens.predict(pictures())
    called = [member.called_on for member in ens.extractors]
    assert all(len(calls) == 2 for calls in called)
    assert {grad for (_, _, grad), _ in called} == {True}
    assert {grad for _, (_, _, grad) in called} == {False}
    assert all(name.startswith("member") and threads == 1 for calls in called[:-1] for name, threads, _ in calls)
    assert [(name, threads) for name, threads, _ in called[-1]] == [("MainThread", THREADS)] * 2
    assert torch.get_num_threads() == THREADS


def test_gradients_asked_for_without_backward_touch_nothing():
    ens, x = build("threaded"), pictures()
    wanted = [ens.extractors[0].conv.weight, ens.extractors[4].norm.bias, ens.head.weight]
    found = torch.autograd.grad(ens(x).square().sum(), wanted)
    assert all(p.grad is None for p in ens.parameters())
    one = build("sequential")
    like = [one.extractors[0].conv.weight, one.extractors[4].norm.bias, one.head.weight]
    assert_close(found, torch.autograd.grad(one(x).square().sum(), like), rtol=1e-5, atol=1e-6)


def test_a_graph_that_is_kept_gives_the_gradient_twice():
    ens = build("threaded")
    loss = ens(pictures()).square().sum()
    loss.backward(retain_graph=True)
    once = ens.extractors[1].conv.weight.grad.clone()
    loss.backward()
    assert_close(ens.extractors[1].conv.weight.grad, 2 * once)


def test_frozen_members_stay_and_others_learn():
    ens = build("threaded")
    ens.extractors[0].requires_grad_(False)
    ens(pictures()).square().sum().backward()
    assert all(p.grad is None for p in ens.extractors[0].parameters())
    assert ens.extractors[1].conv.weight.grad.abs().sum() > 0


def test_autocast_and_inference_mode_reach_the_threads():
    ens = build("threaded").eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert ens.extractors[0].conv(pictures()).dtype == torch.bfloat16
        assert ens.features(pictures()).dtype == torch.bfloat16
    with torch.inference_mode():
        assert ens.features(pictures()).is_inference()


def test_random_numbers_are_refused_in_training_and_harmless_in_prediction():
    ens = build("threaded", p=0.5)
    assert ens.predict(pictures()).isfinite().all()
    with pytest.raises(ValueError, match='dropout, cannot be run="threaded"; use run="sequential"'):
        ens(pictures())


def test_an_error_in_a_thread_reaches_the_caller():
    with pytest.raises(RuntimeError, match="channels"):
        build("threaded")(torch.zeros(B, 3, 6, 6))


def test_compiled_members_agree_too():
    y = torch.arange(B) % C
    found = []
    for compiled in (False, True):
        ens = ff.Ensemble([nn.Sequential(nn.Linear(4, H), nn.Tanh()) for _ in range(N)], nn.Linear(H, C))
        ens.run = "threaded"
        torch.manual_seed(0)
        for p in ens.parameters():
            nn.init.normal_(p)
        if compiled:
            for extractor in ens.extractors:
                extractor.compile(backend="aot_eager", dynamic=False)
        x = torch.randn(B, 4, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            F.cross_entropy(ens(x).flatten(0, 1), y.repeat(N)).backward()
        found.append(({name: p.grad for name, p in ens.named_parameters()}, ens.predict(x)))
    assert_close(found[1], found[0])
