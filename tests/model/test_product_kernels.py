"""The products with gelu inside, whose Gluon kernels are emulated on a CPU, beside plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from longstride.model.product_kernels import product_gelu, product_gelu_backward
from tests.attention.kernels.hopper.emulation import emulated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")
CASES = [(1, 512, 256, True), (300, 256, 256, False), (1000, 64, 128, True), (129, 512, 128, True)]
"""Rows, width, inner width, and whether there are a bias and what training needs."""
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def unwritten(*shape):
    return torch.full(shape, torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize(("rows", "width", "inner", "training"), CASES)
def test_forward(rows, width, inner, training, late):
    x, weight, bias = some(rows, width), some(inner, width) / width**0.5, some(inner) if training else None
    output, slope = unwritten(rows, inner), unwritten(rows, inner) if training else None
    with emulated(late) as names:
        product_gelu(x, weight, bias, output, slope)
    assert names == ["gelu_product"]
    z = F.linear(x, weight, bias).requires_grad_()
    expected = z * torch.sigmoid(1.702 * z)
    torch.testing.assert_close(output, expected.detach(), **CLOSE)
    if training:
        torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), z)[0], **CLOSE)


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize(("rows", "width", "inner", "training"), CASES)
def test_backward(rows, width, inner, training, late):
    d_output, weight, slope = some(rows, width), some(width, inner) / width**0.5, some(rows, inner)
    gradient, sums = unwritten(rows, inner), unwritten(inner) if training else None
    with emulated(late) as names:
        product_gelu_backward(d_output, weight, slope, gradient, sums)
    assert names == ["gelu_product_gradient"]
    torch.testing.assert_close(gradient, d_output @ weight * slope, **CLOSE)
    if training:  # Added up in float32.
        torch.testing.assert_close(sums, gradient.sum(0), rtol=1e-5, atol=1e-5)
