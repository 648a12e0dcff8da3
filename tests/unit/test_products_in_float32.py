"""results/products_in_float32.py: the same numbers as PyTorch's bfloat16 kernels where sums are exact."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def products(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS))
    import products_in_float32

    monkeypatch.setattr(F, "linear", F.linear)  # restored afterwards
    monkeypatch.setattr(F, "conv2d", F.conv2d)
    return products_in_float32


def _whole(*shape):
    return torch.randint(-9, 10, shape).float().requires_grad_()


def _computed(f, *inputs):
    with torch.autocast("cpu", torch.bfloat16):
        output = f(*inputs)
    weight = torch.arange(output.numel()).view(output.shape) % 5 - 2.0
    gradients = torch.autograd.grad((output.float() * weight).sum(), inputs)
    return [output, *gradients]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv2d", "strided"])
def test_outputs_and_gradients_equal_those_of_bfloat16_kernels(products, kind, bias):
    """Sums of small whole numbers are exact in any order; rounded to bfloat16 they may be larger than 256."""
    torch.manual_seed(0)
    if kind == "linear":
        inputs = [_whole(4, 3, 100), _whole(7, 100), _whole(7)]
    else:
        inputs = [_whole(2, 12, 9, 8), _whole(7, 12, 3, 3), _whole(7)]
    inputs = inputs if bias else inputs[:2]

    def f(x, weight, bias=None):
        if kind == "linear":
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, *(((2, 1), (0, 1)) if kind == "strided" else (1, 1)))

    expected = _computed(f, *inputs)
    products.install()
    found = _computed(f, *inputs)
    assert F.linear is products.linear
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert found[0].dtype == torch.bfloat16
    assert found[1].abs().max() > 8  # not trivially exact


def test_without_autocast_nothing_is_rounded(products):
    products.install()
    x, weight = torch.tensor([[1 + 2**-20]]), torch.ones(1, 1)
    assert F.linear(x, weight).item() == 1 + 2**-20
    assert F.conv2d(x.view(1, 1, 1, 1), weight.view(1, 1, 1, 1)).item() == 1 + 2**-20
