"""for_inference: the same probabilities, with BatchNorm folded into convolutions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.ensemble.inference import fold_batch_norm
from featureflock.models import CifarResNetConfig, FastCNNConfig, MLPConfig, WideResNetConfig


def trained(architecture, members: int = 3, shared: bool = True) -> tuple[ff.Ensemble, torch.Tensor]:
    """An ensemble with trained weights and running statistics."""
    torch.manual_seed(0)
    extractors = [architecture.extractor((3, 16, 16)) for _ in range(members)]
    heads = [architecture.head(extractors[0], 5) for _ in range(members)]
    ens = ff.Ensemble(extractors, heads[0] if shared else heads, ff.ParticleLayer() if shared else None)
    x, y = torch.randn(20, 3, 16, 16), torch.arange(20) % 5
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(ens(x).flatten(0, 1), y.repeat(members)).backward()
        optimiser.step()
    return ens, x


def norms(module: nn.Module) -> int:
    return sum(isinstance(m, nn.BatchNorm2d) for m in module.modules())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("architecture", "left"), [(WideResNetConfig(10, 1), 4), (CifarResNetConfig(8), 0), (FastCNNConfig((16, 16)), 2)]
)
def test_probabilities_are_the_same_after_folding(architecture, left, shared):
    ens, x = trained(architecture, shared=shared)
    ens.temperature = 1.7
    before = copy.deepcopy(ens.state_dict())
    fast = ens.for_inference(compile=False)
    assert_close(fast.predict(x), ens.predict(x), rtol=0, atol=1e-5)
    assert_close(fast.member_predictions(x), ens.member_predictions(x), rtol=1e-4, atol=1e-4)
    assert norms(fast) == left * len(ens) < norms(ens)
    assert not fast.training
    assert not any(p.requires_grad for p in fast.parameters())
    assert ens.training
    assert_close(ens.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", [WideResNetConfig(10, 1), CifarResNetConfig(8)])
def test_all_members_are_compiled_in_one_graph(monkeypatch, architecture):
    """PyTorch stops compiling at the ninth graph of a function."""
    graphs = []

    def compile_fx(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr("featureflock.ensemble.inference.compiler_problem", lambda device: None)
    ens, x = trained(architecture, members=10)
    fast = ens.for_inference()
    assert_close(fast.predict(x), ens.predict(x), rtol=0, atol=1e-5)
    assert len(graphs) == 1


def test_linear_layers_are_not_compiled_on_a_cpu():
    ens, x = trained(MLPConfig((4,)))
    fast = ens.for_inference()
    assert all(m._compiled_call_impl is None for m in fast.compiled_modules())
    assert_close(fast.predict(x), ens.predict(x), rtol=0, atol=1e-6)
    forced = ens.for_inference(compile=True)
    assert all(m._compiled_call_impl is not None for m in forced.compiled_modules())


def test_training_does_not_change_the_copy():
    ens, x = trained(CifarResNetConfig(8))
    fast = ens.for_inference(compile=False)
    first = fast.predict(x)
    with torch.no_grad():
        for p in ens.parameters():
            p.add_(0.1)
    assert torch.equal(fast.predict(x), first)


def test_folding_matches_the_equation():
    conv, norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
    torch.manual_seed(0)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 2.0)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    (one,) = [m for m in fold_batch_norm(nn.Sequential(conv, norm).eval()).modules() if isinstance(m, nn.Conv2d)]
    assert_close(one.weight, scale[:, None, None, None] * conv.weight)
    assert_close(one.bias, norm.bias + scale * (conv.bias - norm.running_mean))


class UsedTwice(nn.Module):
    """The output of the convolution is used twice, so BatchNorm cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        z = self.conv(x)
        return z + self.norm(z)


class CalledTwice(UsedTwice):
    """One convolution is called twice, and only one call is followed by BatchNorm."""

    def forward(self, x):
        return self.conv(x) + self.norm(self.conv(x.flip(-1)))


class DataDependent(UsedTwice):
    """The control flow depends on the input, so it cannot be traced."""

    def forward(self, x):
        return self.norm(self.conv(x)) if x.sum() > 0 else self.conv(x)


@pytest.mark.parametrize("kind", [UsedTwice, CalledTwice, DataDependent])
def test_batch_norm_that_cannot_be_folded_stays(kind):
    torch.manual_seed(0)
    module = kind().eval()
    module.norm.running_mean.fill_(0.7)
    x = torch.randn(4, 2, 6, 6)
    assert norms(fold_batch_norm(module)) == 1
    assert_close(fold_batch_norm(module)(x), module(x))
