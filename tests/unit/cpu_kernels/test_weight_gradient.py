"""The kernel for gradients of convolutions' weights, against autograd in float64, and inside a compiled network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from featureflock.cpu_kernels import faster_convolutions, is_worthwhile
from featureflock.cpu_kernels.compile_c import compiled
from featureflock.cpu_kernels.weight_gradient import KERNEL, weight_gradient
from featureflock.models.wide_resnet import WideResNet

needs_compiler = pytest.mark.skipif(
    compiled(*KERNEL) is None, reason="There is no C compiler here, which the kernel needs."
)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("batch", "inputs", "outputs", "height", "width"),
    [(1, 8, 4, 1, 1), (3, 8, 12, 5, 7), (37, 16, 20, 8, 8), (2, 24, 8, 33, 40), (5, 64, 32, 4, 2)],
)
def test_is_the_derivative_with_respect_to_the_weights(batch, inputs, outputs, height, width, stride, threads):
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, inputs, height, width, generator=generator)
    size = (height - 1) // stride + 1, (width - 1) // stride + 1
    grad = torch.randn(batch, outputs, *size, generator=generator)
    weight = torch.zeros(outputs, inputs, 3, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(x.double(), weight, stride=stride, padding=1), weight, grad.double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = weight_gradient(grad, x, stride)
    finally:
        torch.set_num_threads(before)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, weight_gradient(grad, x, stride))  # whatever the number of threads


@needs_compiler
def test_takes_its_place_in_compiled_networks_and_changes_nothing_else():
    torch.manual_seed(0)
    plain, fast = (WideResNet(10, 1).to(memory_format=torch.channels_last) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    found = []

    class Spying(type(faster_convolutions)):
        def __call__(self, graph):
            super().__call__(graph)
            found.extend(node.target for node in graph.nodes if node.op == "call_function")

        def uuid(self):
            return None  # not to be kept for later

    fast.compile(dynamic=False, options={"post_grad_custom_pre_pass": Spying()})
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for net in (plain, fast):
        net(x).square().sum().backward()
    ours = found.count(torch.ops.featureflock.weight_gradient.default)
    wide = [m for m in plain.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) and m.in_channels >= 8]
    assert ours == len(wide) == 6
    for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert (q.grad - p.grad).norm() < 1e-4 * p.grad.norm(), name


def test_is_only_for_processors_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not is_worthwhile()


def test_without_a_compiler_there_is_no_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled.cache_clear()
    try:
        assert not is_worthwhile()
    finally:
        compiled.cache_clear()
