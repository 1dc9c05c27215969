import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import longstride
from longstride.model.layers import Norm, gelu
from tests.model.small import model, some_bytes


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


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_norms_gradients_do_not_depend_on_the_number_of_threads(threads):
    norm, slopes = Norm(128), torch.randn(4, 512, 128)
    x = torch.randn(4, 512, 128, requires_grad=True)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), slopes))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_step_has_the_same_bits_with_one_and_two_threads(threads):
    made = model(layers=1, width=128, heads=4, context=512, pattern="distinct(merged(fixed(32, 8)))", embedding="matrix(32)")
    tokens, found = some_bytes(2, 512), []
    for count in (1, 2):
        threads(count)
        loss = made.loss(tokens)
        found.append((loss, *torch.autograd.grad(loss, list(made.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_norm_of_one_row_has_gradients():
    norm, x = Norm(8), torch.randn(8, requires_grad=True)
    ours = torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), torch.ones(8))
    plain = torch.autograd.grad(F.layer_norm(x, (8,), norm.weight, norm.bias), (x, norm.weight, norm.bias), torch.ones(8))
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b)


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


def forwards():
    """The forward of every autograd.Function in the package, as (file and class, syntax tree)."""
    for path in sorted(Path(longstride.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
                yield from (
                    (f"{path.name}: {node.name}", item)
                    for item in node.body
                    if isinstance(item, ast.FunctionDef) and item.name == "forward"
                )


def test_no_function_calls_an_in_place_method():
    """torch.compile of PyTorch 2.11 loses the gradients of such functions (pytorch/pytorch#180642); newer ones do not."""
    found = list(forwards())
    assert len(found) >= 10
    for name, forward in found:
        calls = [node.func for node in ast.walk(forward) if isinstance(node, ast.Call)]
        methods = [call.attr for call in calls if isinstance(call, ast.Attribute)]
        assert not [method for method in methods if method.endswith("_")], name
