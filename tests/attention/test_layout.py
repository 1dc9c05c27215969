"""attend with the lse, against an explicit mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from longstride import attend
from longstride.patterns import Block, Column, Dense, Local, Summary
from tests.attention.layouts import Case, cases
from tests.attention.plans import tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
FAST = pytest.mark.parametrize("impl", ["blocked", "triton"])
HEADS = [Local(4) | Column(5), Block(6) | Summary(6, 2)]


@given(cases())
@settings(max_examples=60)
def test_agrees_with_the_oracle(case):
    case.check("blocked", device=DEVICE)


@given(cases(longest_n=24), st.sampled_from([16, 32]), st.sampled_from([16, 32]))
@settings(max_examples=6)
def test_triton_agrees_with_the_oracle(case, rows, columns):
    with tiles_of(rows, columns):
        case.check("triton", device=DEVICE)


@given(cases(longest_n=25))
@settings(max_examples=15)
def test_the_reference_agrees_with_the_oracle(case):
    case.check("reference", device=DEVICE)


@pytest.mark.slow
@given(cases(longest_n=300, longest_stride=80))
@settings(max_examples=500)
def test_agrees_with_the_oracle_at_length(case):
    case.check("blocked", device=DEVICE)


@pytest.mark.slow
@given(cases(longest_n=130, longest_stride=40), st.sampled_from([16, 32]), st.sampled_from([16, 32]))
@settings(max_examples=500)
def test_triton_agrees_with_the_oracle_at_length(case, rows, columns):
    with tiles_of(rows, columns):
        case.check("triton", device=DEVICE)


LSE = Case(HEADS, 2, 2, 9, 9, 4, 6, {})


@ALL
def test_half_precision(impl):
    LSE.check(impl, torch.float16, DEVICE)


@ALL
def test_the_lse_alone_has_gradients(impl):
    inputs = LSE.tensors(device=DEVICE)
    with_output = torch.autograd.grad(attend(*inputs, HEADS, impl="reference", return_lse=True)[1].sum(), inputs[:2])
    _, lse = attend(*inputs, HEADS, impl=impl, return_lse=True)
    ours = torch.autograd.grad(lse.sum(), inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours[:2], with_output)
    assert (ours[2] == 0).all()


@ALL
def test_the_output_is_that_without_the_lse(impl):
    inputs = LSE.tensors(device=DEVICE)
    output, lse = attend(*inputs, HEADS, impl=impl, return_lse=True)
    plain = attend(*inputs, HEADS, impl=impl)
    assert torch.equal(output, plain)
    assert lse.dtype == torch.float32
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(output.square().sum(), inputs), expected))


@ALL
def test_a_query_without_keys(impl):
    inputs = Case([Summary(4, 1)], 1, 1, 6, 6, 2, 2, {}).tensors(device=DEVICE)
    _, lse = attend(*inputs, Summary(4, 1), impl=impl, return_lse=True)
    assert (lse[0, 0, :3] == -torch.inf).all()
    assert lse[0, 0, 3:].isfinite().all()
    for x in torch.autograd.grad(lse[..., 3:].sum(), inputs, allow_unused=True, materialize_grads=True):
        assert x.isfinite().all()


def loss(impl, options):
    def call(q, k, v):
        output, lse = attend(q, k, v, HEADS, impl=impl, return_lse=True, **options)
        return output.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()

    return call


LAYOUTS = {"lse": LSE}


@ALL
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_transforms(impl, case):
    """grad, vmap of it, and a compiled graph give what autograd gives."""
    call = loss(impl, case.options)
    inputs = case.tensors(device=DEVICE)
    expected = torch.autograd.grad(call(*inputs), inputs)
    inputs = [x.detach() for x in inputs]
    by_grad = grad(call, argnums=(0, 1, 2))
    torch.testing.assert_close(by_grad(*inputs), expected, rtol=1e-5, atol=1e-5)
    stacks = [torch.stack([x, x.flip(0)]) for x in inputs]
    both = vmap(by_grad)(*stacks)
    torch.testing.assert_close(tuple(x[0] for x in both), expected, rtol=1e-5, atol=1e-5)


@ALL
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_compiles_without_a_graph_break(impl, case):
    torch._dynamo.reset()
    call = loss(impl, case.options)
    inputs = case.tensors(device=DEVICE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*inputs), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


@FAST
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_operators_keep_their_promises(impl, case):
    q, k, v = case.tensors(device=DEVICE)
    text = ", ".join(map(repr, case.heads))
    documents = [n for row in case.rows for n in row] if isinstance(case.options.get("documents"), torch.Tensor) else []
    documents = documents or list(case.options.get("documents", []))
    forward = getattr(torch.ops.longstride, f"{impl}_layout_forward").default
    torch.library.opcheck(forward, (q, k, v, text, 0.5, documents))
    with torch.no_grad():
        output, lse, *by_query = forward(q, k, v, text, 0.5, documents)
        inputs = (x.detach() for x in (q, k, v))
        for d_lse in (None, torch.ones_like(lse)):
            arguments = output.cos(), d_lse, *inputs, output, *by_query, text, 0.5, documents, [True, False, True]
            torch.library.opcheck(getattr(torch.ops.longstride, f"{impl}_layout_backward").default, arguments)
            inputs = (x.detach() for x in (q, k, v))


@FAST
def test_forward_mode_is_refused(impl):
    q, k, v = (x.detach() for x in LSE.tensors(device=DEVICE))
    with pytest.raises(NotImplementedError, match=f"attend: impl = '{impl}' has no forward-mode derivatives"):
        torch.func.jvp(lambda x: attend(x, k, v, HEADS, impl=impl, return_lse=True)[1], (q,), (q,))


def test_the_reference_has_forward_mode():
    q, k, v = (x.detach().double() for x in LSE.tensors(device=DEVICE))
    call = loss("reference", {})
    _, tangent = torch.func.jvp(lambda x: call(x, k, v), (q,), (q,))
    torch.testing.assert_close(tangent, (grad(call)(q, k, v) * q).sum())


@ALL
def test_autocast_keeps_the_lse_in_float32(impl):
    q, k, v = LSE.tensors(device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        output, lse = attend(q, k, v, HEADS, impl=impl, return_lse=True)
    assert (output.dtype, lse.dtype) == (torch.float16, torch.float32)


def test_dense_lse_by_hand():
    q, k, v = (torch.tensor([[[[x], [y]]]]) for x, y in ((1.0, 2.0), (3.0, -1.0), (0.0, 1.0)))
    _, lse = attend(q, k, v, Dense(), return_lse=True)
    torch.testing.assert_close(lse[0, 0], torch.tensor([3.0, torch.logaddexp(torch.tensor(6.0), torch.tensor(-2.0))]))
