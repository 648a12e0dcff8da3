"""The C kernel for weight gradients against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from featureflock.cpu_kernels.compile_c import lanes, load_kernel
from featureflock.cpu_kernels.weight_gradient import KERNEL, weight_gradient


@pytest.fixture(autouse=True, params=["AVX2", "AVX512"])
def capability(request, monkeypatch):
    """Kernels for both lengths of vectors; the compiler splits those that the processor does not have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)


pytestmark = pytest.mark.skipif(load_kernel(*KERNEL) is None, reason="The kernel needs a C compiler.")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("batch", "inputs", "outputs", "height", "width"),
    [(1, 8, 4, 1, 1), (3, 8, 12, 5, 7), (37, 16, 20, 8, 8), (2, 24, 8, 33, 40), (5, 64, 32, 4, 2)],
)
def test_is_the_derivative_with_respect_to_the_weights(batch, inputs, outputs, height, width, stride, threads):
    inputs, outputs = inputs * lanes() // 8, outputs * lanes() // 8
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, inputs, height, width, generator=generator)
    size = (height - 1) // stride + 1, (width - 1) // stride + 1
    grad = torch.randn(batch, outputs, *size, generator=generator)
    weight = torch.zeros(outputs, inputs, 3, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(x.double(), weight, stride=stride, padding=1), weight, grad.double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = weight_gradient(grad, x, stride)
    finally:
        torch.set_num_threads(before)
    assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, weight_gradient(grad, x, stride))  # for any number of threads
