"""The C kernel for Winograd convolutions against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from featureflock.cpu_kernels.compile_c import lanes, load_kernel
from featureflock.cpu_kernels.winograd import KERNEL, winograd


@pytest.fixture(autouse=True, params=["AVX2", "AVX512"])
def capability(request, monkeypatch):
    """Kernels for both lengths of vectors; the compiler splits those that the processor does not have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)


pytestmark = pytest.mark.skipif(load_kernel(*KERNEL) is None, reason="The kernel needs a C compiler.")


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
    inputs, outputs = inputs * lanes() // 8, outputs * lanes() // 8
    torch.manual_seed(batch)
    x, weight = torch.randn(batch, inputs, height, width), torch.randn(outputs, inputs, 3, 3)
    bias = torch.randn(outputs) if with_bias else None
    expected = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = winograd(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert (result - expected).norm() < 2e-6 * expected.norm()
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, winograd(x, weight, bias))  # for any number of threads


def test_images_do_not_affect_each_other():
    x = torch.randn(3, lanes(), 5, 5).contiguous(memory_format=torch.channels_last)
    x[1] = torch.nan
    result = winograd(x, torch.randn(2 * lanes(), lanes(), 3, 3), None)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (96, 32)])
def test_backward_is_the_derivative_with_respect_to_the_input(inputs, outputs):
    torch.manual_seed(0)
    x, weight = (
        torch.zeros(3, inputs, 7, 10, dtype=torch.float64, requires_grad=True),
        torch.randn(outputs, inputs, 3, 3),
    )
    grad = torch.randn(3, outputs, 7, 10)
    (expected,) = torch.autograd.grad(F.conv2d(x, weight.double(), padding=1), x, grad.double())
    assert (winograd(grad, weight, None, True) - expected).norm() < 2e-6 * expected.norm()
