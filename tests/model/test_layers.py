import pytest
import torch
import torch.nn.functional as F

from longstride.model.layers import Norm, gelu


def plain_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def test_gelu_and_its_gradient():
    x = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gelu(x), plain_gelu(x))
    assert torch.autograd.gradcheck(gelu, x)


def test_norm_and_its_gradients():
    norm = Norm(7).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (7,), norm.weight, norm.bias, 1e-5))
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: torch.func.functional_call(norm, {"weight": weight, "bias": bias}, x),
        (x, norm.weight.detach().requires_grad_(), norm.bias.detach().requires_grad_()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Results and gradients have the dtype of what they belong to, and are as near as that allows."""
    norm = Norm(64)
    x = torch.randn(5, 64).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    slopes = torch.randn(5, 64).to(dtype)
    for ours, true in ((norm, lambda x: F.layer_norm(x, (64,))), (gelu, plain_gelu)):
        result = ours(x)
        (gradient,) = torch.autograd.grad(result, x, slopes)
        (expected,) = torch.autograd.grad(true(exact), exact, slopes.double())
        assert result.dtype == gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected, rtol=0.02, atol=0.02)


def test_only_the_input_is_kept():
    kept = []
    x = torch.randn(100, 64).bfloat16().requires_grad_()
    norm = Norm(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        gelu(norm(x))
    assert sorted(kept) == [64, 64, 100, 100, 6400, 6400]


def test_they_compile_without_a_break():
    norm = Norm(16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return gelu(norm(x)).sum()

    x = torch.randn(3, 16, requires_grad=True)
    (ours,) = torch.autograd.grad(step(x), x)
    (plain,) = torch.autograd.grad(gelu(norm(x)).sum(), x)
    torch.testing.assert_close(ours, plain)
