"""The kernel for convolutions with fewer multiplications, against float64, and inside a compiled network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from featureflock.cpu_kernels import faster_convolutions
from featureflock.cpu_kernels.compile_c import compiled
from featureflock.cpu_kernels.winograd import KERNEL, winograd
from featureflock.models.wide_resnet import WideResNet

needs_compiler = pytest.mark.skipif(
    compiled(*KERNEL) is None, reason="There is no C compiler here, which the kernel needs."
)
OURS = torch.ops.featureflock.winograd.default


class Spying(type(faster_convolutions)):
    """The pass, and which functions it leaves in a graph."""

    def __init__(self):
        self.found = []

    def __call__(self, graph):
        super().__call__(graph)
        self.found.extend(node.target for node in graph.nodes if node.op == "call_function")

    def uuid(self):
        return None  # not to be kept for later


def spied_on(net):
    torch.compiler.reset()  # or there would be too many graphs of one function
    net.to(memory_format=torch.channels_last)
    spy = Spying()
    return torch.compile(lambda x: net(x), dynamic=False, options={"post_grad_custom_pre_pass": spy}), spy


def images(*shape):
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("batch", "inputs", "outputs", "height", "width"),
    [
        (1, 8, 16, 1, 1),
        (3, 8, 48, 5, 7),
        (37, 16, 16, 8, 8),
        (2, 24, 32, 33, 40),
        (5, 64, 32, 4, 2),
        (1, 1024, 16, 3, 9),
    ],
)
def test_is_the_convolution(batch, inputs, outputs, height, width, with_bias, threads):
    torch.manual_seed(batch)
    x, weight = torch.randn(batch, inputs, height, width), torch.randn(outputs, inputs, 3, 3)
    bias = torch.randn(outputs) if with_bias else None
    expected = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = winograd(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert (found - expected).norm() < 2e-6 * expected.norm()
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, winograd(x, weight, bias))  # whatever the number of threads


@needs_compiler
def test_what_is_beyond_an_image_does_not_reach_it():
    x = images(3, 8, 5, 5)
    x[1] = torch.nan
    found = winograd(x, torch.randn(16, 8, 3, 3), None)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@needs_compiler
def test_takes_its_place_in_compiled_networks_that_predict():
    torch.manual_seed(0)
    plain, fast = (WideResNet(10, 2).to(memory_format=torch.channels_last).eval() for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    spy = Spying()
    fast.compile(dynamic=False, options={"post_grad_custom_pre_pass": spy})
    x = images(32, 3, 32, 32)
    with torch.no_grad():
        expected, found = plain(x), fast(x)
    wide = [m for m in plain.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) and m.in_channels >= 32]
    assert spy.found.count(OURS) == sum(m.stride == (1, 1) for m in wide) == 3
    assert (found - expected).norm() < 1e-5 * expected.norm()


@needs_compiler
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (48, 32)])
def test_backward_is_the_derivative_with_respect_to_the_input(inputs, outputs):
    torch.manual_seed(0)
    x, weight = (
        torch.zeros(3, inputs, 7, 10, dtype=torch.float64, requires_grad=True),
        torch.randn(outputs, inputs, 3, 3),
    )
    grad = torch.randn(3, outputs, 7, 10)
    (expected,) = torch.autograd.grad(F.conv2d(x, weight.double(), padding=1), x, grad.double())
    assert (winograd(grad, weight, None, True) - expected).norm() < 2e-6 * expected.norm()


@needs_compiler
def test_networks_learn_with_it():
    net = nn.Conv2d(32, 48, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    convolve, spy = spied_on(net)
    x = images(32, 32, 16, 16).requires_grad_()
    gradients = [torch.autograd.grad(call(x).square().sum(), (x, net.weight)) for call in (net, convolve)]
    for plain, fast in zip(*gradients, strict=True):
        assert (fast - plain).norm() < 1e-5 * plain.norm()
    assert spy.found.count(OURS) == 2  # forward, and with respect to x
    assert torch.ops.featureflock.weight_gradient.default in spy.found
    assert torch.ops.aten.convolution_backward.default not in spy.found


@pytest.mark.parametrize(
    ("batch", "inputs", "outputs", "size", "options"),
    [
        (32, 32, 32, 16, {"stride": 2}),
        (32, 32, 32, 16, {"padding": 0}),
        (32, 32, 32, 16, {"dilation": 2}),
        (32, 32, 32, 16, {"groups": 2}),
        (32, 32, 32, 16, {"dtype": torch.float64}),
        (32, 64, 40, 16, {}),  # not panels of 16
        (32, 16, 32, 16, {}),  # few channels
        (4, 32, 32, 16, {}),  # few tiles
    ],
)
def test_leaves_other_convolutions_alone(batch, inputs, outputs, size, options):
    net = nn.Conv2d(inputs, outputs, 3, **{"padding": 1, **options})
    convolve, spy = spied_on(net)
    x = images(batch, inputs, size, size).to(net.weight.dtype)
    with torch.no_grad():
        assert_close(convolve(x), net(x))
    assert torch.ops.aten.convolution.default in spy.found
    assert OURS not in spy.found
