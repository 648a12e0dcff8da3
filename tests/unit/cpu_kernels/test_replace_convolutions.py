"""The graph pass: which convolutions it replaces, that results stay the same, and when it is not used."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from featureflock.cpu_kernels import compile_c, weight_gradient, winograd
from featureflock.cpu_kernels.compile_c import load_kernel
from featureflock.cpu_kernels.replace_convolutions import convolution, kernels_problem, replace_convolutions

CONVOLUTION = torch.ops.featureflock.convolution.default

needs_compiler = pytest.mark.skipif(
    any(load_kernel(*k) is None for k in (weight_gradient.KERNEL, winograd.KERNEL)), reason="Kernels need a C compiler."
)


@pytest.fixture(params=["AVX2", "AVX512"])
def capability(request, monkeypatch):
    """Kernels for both lengths of vectors; the compiler splits those that the processor does not have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return request.param


def tensors(batch=32, inputs=64, outputs=96, size=16, groups=1, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(batch, inputs, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, inputs // groups, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return x, weight


def replaced(x, weight, train=False, **options):
    """Whether the pass replaces a convolution in a graph as torch.compile gives it to its backend."""
    graphs = []

    def backend(graph, _):
        replace_convolutions(graph.graph)
        graph.graph.lint()
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: F.conv2d(x, w, **{"padding": 1} | options), backend=backend)
    compiled(x, weight.requires_grad_(train))
    return CONVOLUTION in [node.target for graph in graphs for node in graph.graph.nodes]


@needs_compiler
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sizes", [{}, {"inputs": 8, "outputs": 12}, {"inputs": 48, "outputs": 16, "size": 7}])
def test_operator_and_its_gradients_are_those_of_a_convolution(capability, sizes, stride):
    x, weight = tensors(**sizes)
    bias = torch.randn(len(weight))
    ours, exact = [
        [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)] for dtype in (torch.float32, torch.float64)
    ]
    y, expected = convolution(*ours, stride), F.conv2d(*exact, stride, 1)
    assert (y - expected).norm() < 1e-5 * expected.norm()
    grad = torch.randn(y.shape)
    y.backward(grad)
    expected.backward(grad.double())
    for a, b in zip(ours, exact, strict=True):
        assert (a.grad - b.grad).norm() < 1e-5 * b.grad.norm()


def test_gradients_that_are_not_needed_are_not_computed():
    x, weight = tensors()
    weight.requires_grad_()
    convolution(x, weight, None, 1).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


@needs_compiler
def test_the_operator_can_be_compiled():
    x, weight = tensors(batch=2)
    torch.library.opcheck(convolution, (x, weight.requires_grad_(), None, 1))
    torch.library.opcheck(convolution, (x, weight, torch.zeros(96), 2))


@needs_compiler
def test_convolutions_are_replaced(capability):
    assert replaced(*tensors())
    assert replaced(*tensors(), train=True, stride=2)  # for the gradient with respect to the weights


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"stride": 2}),
        ({}, {"padding": 0}),
        ({}, {"padding": "same"}),
        ({}, {"dilation": 2}),
        ({"groups": 2}, {"groups": 2}),
        ({"dtype": torch.float64}, {}),
        ({"inputs": 64, "outputs": 40}, {}),  # not a multiple of two vectors
        ({"inputs": 16, "outputs": 32}, {}),  # few channels
        ({"batch": 4}, {}),  # few tiles
    ],
)
def test_other_convolutions_are_left_alone(sizes, options):
    assert not replaced(*tensors(**sizes), **options)


def test_not_with_bfloat16_nor_the_default_memory_format():
    x, weight = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        assert not replaced(x, weight)
    assert not replaced(x.contiguous(), weight)


# When they are used


@needs_compiler
def test_used_with_avx2_and_avx512(capability):
    assert kernels_problem() is None


def test_not_used_on_other_processors(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert kernels_problem() == "they need AVX2 or AVX-512, and PyTorch uses DEFAULT here"


def test_not_used_without_a_c_compiler(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compile_c._load.cache_clear()
    try:
        assert kernels_problem() == "no C compiler can compile them"
    finally:
        compile_c._load.cache_clear()


def test_a_symbolic_size_without_a_known_value_counts_as_no_tiles():
    """The traced value of a symbolic size is not public: without it, convolutions are left alone."""
    sizes = SimpleNamespace(shape=(8, 64, 32, object()))
    assert not winograd.is_faster(sizes, 64, 64)


def test_a_graph_without_example_values_is_left_alone():
    graph = fx.symbolic_trace(lambda x, w: torch.conv2d(x, w, padding=1)).graph
    replace_convolutions(graph)
    assert torch.conv2d in [node.target for node in graph.nodes]
