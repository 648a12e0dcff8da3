"""torch.compile: the particle layer, inference, and our C kernels in compiled networks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.cpu_kernels import weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import load_kernel
from featureflock.ensemble import compilation
from featureflock.methods import FeatureWGD
from featureflock.models import FastCNNConfig, linear_head
from featureflock.models.wide_resnet import WideResNet
from featureflock.training.compute import ResolvedCompute

N, B, H, C = 4, 6, 5, 3

needs_compiler = pytest.mark.skipif(
    any(load_kernel(*k) is None for k in (weight_gradient.KERNEL, winograd.KERNEL)), reason="Kernels need a C compiler."
)


def mean_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), (torch.arange(B) % C).repeat(len(logits)))


@pytest.mark.parametrize("rank", [None, 3])
def test_particle_layer_in_one_graph(rank):
    torch.manual_seed(0)
    head, layer = nn.Linear(H, C).double(), ff.ParticleLayer(prior=ff.Cauchy(0.2), rank=rank)
    features = torch.randn(N, B, H, dtype=torch.float64)

    def loss(h):
        return mean_loss(head(layer(h)))

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 0.5):
        layer.scale = scale
        a, b = (features.clone().requires_grad_() for _ in range(2))
        (loss(a) * scale).backward()
        (compiled(b) * scale).backward()
        assert_close(b.grad, a.grad)


def test_ensemble_with_inductor():
    torch.manual_seed(0)
    ens = ff.Ensemble(
        [nn.Linear(H, H) for _ in range(N)], nn.Linear(H, C), ff.ParticleLayer(prior=ff.Cauchy(0.2), rank=3)
    )
    x = torch.randn(B, H)
    mean_loss(ens(x)).backward()
    plain = [p.grad.clone() for p in ens.parameters()]
    ens.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(ens, fullgraph=True)
    mean_loss(compiled(x)).backward()
    for p, grad in zip(ens.parameters(), plain, strict=True):
        assert_close(p.grad, grad)
    compiled.eval()
    with torch.no_grad():
        assert_close(compiled(x), ens(x))


def smooth_network():
    """Without ReLU, whose sign would amplify rounding."""
    conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    layers = [conv(16, 64), nn.Tanh(), conv(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, conv(64, 64, stride=2)).to(memory_format=torch.channels_last)


@needs_compiler
def test_kernels_in_a_compiled_network(monkeypatch):
    """Training steps and predictions use our kernels for the convolutions that they support, and give the same."""
    torch.manual_seed(0)
    plain, fast = smooth_network(), smooth_network()
    fast.load_state_dict(plain.state_dict())
    replaced, replace = [], compilation.replace_convolutions

    def record(graph):
        replace(graph)
        replaced.append(len(graph.find_nodes(op="call_function", target=torch.ops.featureflock.convolution.default)))

    monkeypatch.setattr(compilation, "replace_convolutions", record)
    torch.compiler.reset()
    compilation.compile_modules([fast], kernels=True, dynamic=False, required=True)
    x = torch.randn(8, 16, 32, 32).contiguous(memory_format=torch.channels_last)
    for net in (plain, fast):
        net(x).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert (q.grad - p.grad).norm() < 1e-5 * p.grad.norm(), name
    with torch.no_grad():
        assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)
    assert replaced == [3, 1]  # training; prediction: the second one, which is wide and has stride 1


def test_compiled_bfloat16_on_a_cpu_agrees_with_eager():
    """Gradients of maxima compare values with their maximum, which was rounded."""
    losses, network = {}, FastCNNConfig((16, 16))
    for compiled in (False, True):
        compute = ResolvedCompute("cpu", "bfloat16", True, compiled, "sequential", 1)
        method = FeatureWGD()
        ens = method.build(lambda: network.extractor((3, 16, 16)), lambda: linear_head(16, C), members=2, seed=0)
        torch.compiler.reset()
        compute.prepare(ens, compile_required=True)
        optimizer = torch.optim.SGD(ens.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        x = compute.inputs(torch.randn(32, 3, 16, 16, generator=generator))
        losses[compiled] = []
        for _ in range(4):
            optimizer.zero_grad()
            with compute.computing(full_batch=True):
                loss = method.loss(ens, x, torch.arange(32) % C).loss
            loss.backward()
            optimizer.step()
            losses[compiled].append(loss.item())
    assert_close(losses[True], losses[False], rtol=0.01, atol=0.01)


def test_compiled_inference():
    torch.manual_seed(0)
    ens = ff.Ensemble([WideResNet(10, 1) for _ in range(2)], nn.Linear(64, C))
    fast, x = ens.for_inference(compile=True), torch.randn(20, 3, 16, 16)
    for batch in (20, 7):
        assert_close(fast.predict(x[:batch]), ens.predict(x[:batch]), rtol=0, atol=1e-5)
