"""The graph pass: which convolutions it replaces, that results stay the same, and when it is not used."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from featureflock.cpu_kernels import weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import load_kernel
from featureflock.cpu_kernels.replace_convolutions import compile_options, replace_convolutions

WINOGRAD = torch.ops.featureflock.winograd.default
WEIGHT_GRADIENT = torch.ops.featureflock.weight_gradient.default
CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default

needs_compiler = pytest.mark.skipif(
    any(load_kernel(*k) is None for k in (weight_gradient.KERNEL, winograd.KERNEL)), reason="Kernels need a C compiler."
)


def tensors(batch=32, inputs=32, outputs=48, size=16, groups=1, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(batch, inputs, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, inputs // groups, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return x, weight


def convolve(x, weight, padding=1, **options):
    return F.conv2d(x, weight, padding=padding, **options)


def convolve_and_differentiate(x, weight, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = convolve(x, weight, **options)
    return [y, *torch.autograd.grad(y.square().sum(), (x, weight))]


def replaced(function, x, weight, **options):
    """The graph of a function after the pass, and its operators."""
    traced = make_fx(lambda a, b: function(a, b, **options), tracing_mode="fake")(x, weight)
    traced.graph.eliminate_dead_code()  # as torch.compile does first
    replace_convolutions(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, [node.target for node in traced.graph.nodes if node.op == "call_function"]


@needs_compiler
def test_results_and_gradients_stay_the_same():
    x, weight = tensors()
    graph, operators = replaced(convolve_and_differentiate, x, weight)
    for ours, theirs in zip(graph(x, weight), convolve_and_differentiate(x, weight), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert operators.count(WINOGRAD) == 2  # forward, and gradient with respect to x
    assert operators.count(WEIGHT_GRADIENT) == 1
    assert not {CONVOLUTION, BACKWARD} & {*operators}


@needs_compiler
def test_with_stride_2_only_the_weight_gradient_is_replaced():
    x, weight = tensors()
    graph, operators = replaced(convolve_and_differentiate, x, weight, stride=2)
    for ours, theirs in zip(graph(x, weight), convolve_and_differentiate(x, weight, stride=2), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert (operators.count(WINOGRAD), operators.count(WEIGHT_GRADIENT)) == (0, 1)
    (left,) = [n for n in graph.graph.nodes if n.target is BACKWARD]
    assert left.args[-1] == [True, False, False]  # the gradient with respect to x


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"stride": 2}),
        ({}, {"padding": 0}),
        ({}, {"dilation": 2}),
        ({"groups": 2}, {"groups": 2}),
        ({"dtype": torch.float64}, {}),
        ({"inputs": 64, "outputs": 40}, {}),  # not a multiple of 16
        ({"inputs": 16, "outputs": 32}, {}),  # few channels
        ({"batch": 4, "outputs": 32}, {}),  # few tiles
    ],
)
def test_other_convolutions_are_left_alone(sizes, options):
    _, operators = replaced(convolve, *tensors(**sizes), **options)
    assert CONVOLUTION in operators
    assert WINOGRAD not in operators


# When it is used


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@needs_compiler
def test_options_have_the_pass(avx2):
    pytest.importorskip("torch._inductor.custom_graph_pass")
    assert len(compile_options()) == 1


def test_not_used_on_processors_where_it_is_not_faster(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert compile_options() == {}


def test_not_used_without_a_c_compiler(avx2, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    load_kernel.cache_clear()
    try:
        assert compile_options() == {}
    finally:
        load_kernel.cache_clear()


@needs_compiler
def test_not_used_if_pytorch_has_no_custom_passes(avx2, monkeypatch):
    monkeypatch.delitem(sys.modules, "featureflock.cpu_kernels.inductor_pass", raising=False)
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    assert compile_options() == {}


@needs_compiler
def test_not_used_if_torch_compile_has_no_such_option(avx2, monkeypatch):
    inductor = pytest.importorskip("torch._inductor")
    monkeypatch.delitem(sys.modules, "featureflock.cpu_kernels.inductor_pass", raising=False)
    monkeypatch.setattr(inductor, "config", object())
    assert compile_options() == {}


def test_a_symbolic_size_without_a_known_value_counts_as_no_tiles():
    """The traced value of a symbolic size is not public: without it, convolutions are left alone."""
    sizes = SimpleNamespace(shape=(8, 32, 32, object()))
    assert not winograd.is_faster(sizes, 32, 32)
