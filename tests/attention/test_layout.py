"""attend with grouped queries, offsets, documents and the lse, against an explicit mask."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from longstride import attend
from longstride.patterns import Block, Column, Dense, Local, Summary
from tests.attention.error_rule import Ran
from tests.attention.layouts import Case, cases
from tests.attention.plans import tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
FAST = pytest.mark.parametrize("impl", ["blocked", "triton"])
SLOW_TRITON = pytest.param("triton", marks=pytest.mark.slow)
MOST = pytest.mark.parametrize("impl", ["reference", "blocked", SLOW_TRITON])
"""Without a GPU the interpreter takes seconds for each of these."""
HEADS = [Local(4) | Column(5), Block(6) | Summary(6, 2)]


@given(cases())
@settings(max_examples=60)
def test_agrees_with_the_oracle(case):
    case.check("blocked", device=DEVICE)


@given(cases(longest_n=20))
@settings(max_examples=3)
@example(Case([Local(2), Summary(5, 1)], 1, 1, 30, 40, 4, 4, {"documents": [9, 31]}))
def test_triton_agrees_with_the_oracle(case):
    with tiles_of(16, 16):
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
@given(cases(longest_n=70, longest_stride=24), st.sampled_from([16, 32]), st.sampled_from([16, 32]))
@settings(max_examples=30)
def test_triton_agrees_with_the_oracle_at_length(case, rows, columns):
    with tiles_of(rows, columns):
        case.check("triton", device=DEVICE)


LSE = Case(HEADS, 2, 2, 9, 9, 4, 6, {})


@MOST
def test_the_lse_alone_has_gradients(impl):
    inputs = LSE.tensors(device=DEVICE)
    with_output = torch.autograd.grad(attend(*inputs, HEADS, impl="reference", return_lse=True)[1].sum(), inputs[:2])
    _, lse = attend(*inputs, HEADS, impl=impl, return_lse=True)
    ours = torch.autograd.grad(lse.sum(), inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours[:2], with_output)
    assert (ours[2] == 0).all()


@MOST
def test_the_output_is_that_without_the_lse(impl):
    inputs = LSE.tensors(device=DEVICE)
    output, lse = attend(*inputs, HEADS, impl=impl, return_lse=True)
    plain = attend(*inputs, HEADS, impl=impl)
    assert torch.equal(output, plain)
    assert lse.dtype == torch.float32
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(output.square().sum(), inputs), expected))


@MOST
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


LAYOUTS = {
    "lse": LSE,
    "grouped": Case(HEADS, 1, 2, 9, 9, 4, 6, {}),
    "last": Case(HEADS, 2, 2, 4, 9, 4, 6, {}),
    "documents": Case(HEADS, 1, 2, 5, 9, 4, 6, {"offset": 2, "documents": (3, 2, 4)}),
    "equal": Case(HEADS, 1, 1, 9, 9, 4, 6, {"documents": (3, 3, 3)}),
}
NUMBERS = torch.tensor([[7] * 4 + [2] * 5, [0] + [1] * 8])
OF_ROWS = Case(HEADS, 1, 2, 7, 9, 4, 6, {"documents": NUMBERS})


@MOST
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*LAYOUTS.values(), OF_ROWS], ids=[*LAYOUTS, "of rows"])
def test_layouts(impl, case, dtype):
    case.check(impl, dtype, DEVICE)


@ALL
def test_documents_do_not_see_each_other(impl):
    """Not one bit of a document's results depends on another document, NaN and infinity included; nor on the future."""
    case = Case([Local(3), Block(5) | Summary(5, 1)], 1, 1, 40, 40, 4, 4, {"documents": [7, 20, 13]})
    inputs = [x.detach() for x in case.tensors(device=DEVICE)]
    slopes = torch.randn(1, 2, 40, 4, device=DEVICE)

    def results(*changed):
        leaves = [x.clone().requires_grad_() for x in changed]
        output, lse = attend(*leaves, case.heads, impl=impl, return_lse=True, **case.options)
        return [output, lse, *torch.autograd.grad(output, leaves, slopes)]

    before = results(*inputs)
    for value in (3.0, torch.nan):
        other = [x.clone() for x in inputs]
        for x in other:
            x[:, :, :7] = x[:, :, 27:] = value
        for ours, theirs in zip(results(*other), before):
            assert torch.equal(ours[:, :, 7:27], theirs[:, :, 7:27])
    later = [x.clone() for x in inputs]
    for x in later:
        x[:, :, 15:] = 1e30
    for ours, theirs in zip(results(*later)[:2], before):
        assert torch.equal(ours[:, :, :15], theirs[:, :, :15])


@MOST
def test_a_document_is_a_sequence_of_its_own(impl):
    inputs = [x.detach() for x in LSE.tensors(device=DEVICE)]
    together = attend(*inputs, HEADS, impl=impl, documents=[4, 5])
    for part in (slice(0, 4), slice(4, 9)):
        torch.testing.assert_close(together[:, :, part], attend(*(x[:, :, part] for x in inputs), HEADS, impl=impl))
    assert torch.equal(attend(*inputs, HEADS, impl=impl, documents=[9]), attend(*inputs, HEADS, impl=impl))
    numbers = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]).expand(2, 9)
    assert torch.equal(attend(*inputs, HEADS, impl=impl, documents=numbers), together)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_queries_that_are_not_there_see_nothing(impl):
    """A NaN in a key that only they would see reaches no result."""
    q, k, v = Case([Local(3)], 1, 1, 10, 40, 4, 4, {}).tensors(device=DEVICE)
    with torch.no_grad():
        k[:, :, 25] = torch.nan
    output = attend(q, k, v, Local(3), impl=impl)
    for x in (output, *torch.autograd.grad(output.sum(), (q, k, v))):
        assert x.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_document_without_queries_may_hold_nan(impl):
    """It has keys before the first query alone."""
    q, k, v = (torch.randn(1, 2, n, 4) for n in (3, 9, 9))
    expected = attend(q, k, v, Dense(), impl=impl, documents=[4, 5], return_lse=True)
    k[:, :, 2], v[:, :, 3] = torch.nan, torch.inf
    for ours, theirs in zip(attend(q, k, v, Dense(), impl=impl, documents=[4, 5], return_lse=True), expected):
        torch.testing.assert_close(ours, theirs)


@MOST
def test_every_element_is_written(poisoned, impl):
    """Also the gradients of documents without queries, and of keys after the last query."""
    case = Case(HEADS, 1, 2, 6, 20, 4, 6, {"offset": 9, "documents": (3, 8, 7, 2)})
    inputs = case.tensors(device=DEVICE)
    output = attend(*inputs, HEADS, impl=impl, **case.options)
    slopes = torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert all(x.isfinite().all() for x in (output, *slopes))
    for x in slopes[1:]:
        assert (x[:, :, :3] == 0).all()
        assert (x[:, :, 15:] == 0).all()
        assert (x[:, :, 3:15] != 0).any()


@pytest.mark.parametrize("impl", ["blocked", SLOW_TRITON])
def test_cost_follows_the_pairs(impl):
    """The flops that are counted are those of the pairs that are there."""
    q, k, v = Case([Dense()] * 2, 1, 3, 6, 20, 4, 6, {}).tensors(device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, Dense(), impl=impl, documents=[12, 8])
    pairs = 8 * 9 // 2 - 2 * 3 // 2
    assert counter.get_total_flops() == 2 * pairs * 3 * 2 * (4 + 6)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, Dense(), impl=impl, documents=torch.arange(20).expand(3, 20)).sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 3 * 2 * (4 + 6 + 3 * 4 + 2 * 6)


def test_transforms_of_documents_of_rows():
    q, k, v = (x.detach() for x in OF_ROWS.tensors(device=DEVICE))
    stacks = [torch.stack([x, -x]) for x in (q, k, v)]
    ours = vmap(lambda *x: attend(*x, HEADS, **OF_ROWS.options))(*stacks)
    for index in range(2):
        torch.testing.assert_close(ours[index], attend(*(x[index] for x in stacks), HEADS, **OF_ROWS.options))
    with pytest.raises(NotImplementedError, match="documents = a tensor is read by the host"):
        vmap(lambda x: attend(q, k, v, HEADS, documents=x))(NUMBERS.expand(2, 2, 9))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="documents = a tensor is read by the host"):
        torch.compile(attend, fullgraph=True, backend="eager")(q, k, v, HEADS, documents=NUMBERS)


def test_documents_may_be_a_parameter():
    q, k, v = (x.detach() for x in OF_ROWS.tensors(device=DEVICE))
    numbers = torch.nn.Parameter(NUMBERS, requires_grad=False)
    assert torch.equal(attend(q, k, v, HEADS, documents=numbers), attend(q, k, v, HEADS, documents=NUMBERS))


def test_whole_numbers_of_numpy():
    q, k, v = torch.randn(3, 1, 2, 9, 4, device=DEVICE).unbind()
    lengths, some = np.array([4, 5]), q[:, :, 3:6]
    ours = attend(some, k, v, HEADS, offset=np.int64(3), documents=list(lengths))
    assert torch.equal(ours, attend(some, k, v, HEADS, offset=3, documents=lengths.tolist()))
    for wrong in (np.float64(3), np.bool_(True), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"offset = .* must be a whole number"):
            attend(some, k, v, HEADS, offset=wrong)
        with pytest.raises(ValueError, match=r"documents\[1\] must be a length"):
            attend(q, k, v, HEADS, documents=[6, wrong])


def test_inputs_as_the_projections_leave_them():
    """The Triton kernels keep [batch, n, heads, d], and nothing is copied."""
    q, k, v = (torch.randn(2, n, heads, 4, device=DEVICE) for n, heads in ((5, 4), (9, 2), (9, 2)))
    views = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    output = attend(*views, Local(3), impl="triton")
    for x in (output, *torch.autograd.grad(output.sum(), views)):
        assert x.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(output, attend(*(x.contiguous() for x in views), Local(3), impl="reference"))


@MOST
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


@pytest.mark.parametrize("impl", [pytest.param("reference", marks=pytest.mark.slow), "blocked", SLOW_TRITON])
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_compiles_without_a_graph_break(impl, case):
    torch._dynamo.reset()
    call = loss(impl, case.options)
    inputs = case.tensors(device=DEVICE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*inputs), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_exports_with_symbolic_lengths_and_offset():
    class Two(torch.nn.Module):
        def forward(self, first, second):
            x = torch.cat([first, second], 2)
            last = attend(x[:, :, -3:], x, x, Local(5), impl="blocked", offset=x.shape[2] - 3)
            return attend(x, x, x, Local(5), impl="blocked", documents=[first.shape[2], second.shape[2]]), last

    inputs = torch.randn(1, 1, 10, 4), torch.randn(1, 1, 7, 4)
    dim = torch.export.Dim
    shapes = {2: dim("a", min=4, max=99)}, {2: dim("b", min=4, max=99)}
    exported = torch.export.export(Two(), inputs, dynamic_shapes=shapes).module()
    others = torch.randn(1, 1, 12, 4), torch.randn(1, 1, 9, 4)
    torch.testing.assert_close(exported(*others), Two()(*others))


@pytest.mark.parametrize("impl", ["blocked", SLOW_TRITON])
def test_other_lengths_compile_nothing_new(impl):
    """Lengths become symbolic when they change; a graph for each list would reach torch.compile's limit of eight."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(*inputs, documents):
        return attend(*inputs, Local(5) | Block(4), documents=documents, impl=impl)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 1, 31, 4, device=DEVICE).unbind()]
    for lengths in ([10, 4, 17], [11, 3, 17], [5, 5, 21], [6, 7, 18], [1, 29, 1], [2, 2, 27]):
        result, expected = compiled(*inputs, documents=lengths), call(*inputs, documents=lengths)
        torch.testing.assert_close(result, expected)
        gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (result, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("impl", ["blocked", SLOW_TRITON])
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_operators_keep_their_promises(impl, case):
    q, k, v = case.tensors(device=DEVICE)
    text = ", ".join(map(repr, case.heads))
    documents = list(case.options.get("documents", []))
    k, v = (x[:, :, : case.offset + case.n_q] for x in (k, v))
    documents[-1:] = [k.shape[2] - sum(documents[:-1])] if documents else []
    forward = getattr(torch.ops.longstride, f"{impl}_forward").default
    torch.library.opcheck(forward, (q, k, v, text, 0.5, documents))
    with torch.no_grad():
        output, stats = forward(q, k, v, text, 0.5, documents)
        inputs = (x.detach() for x in (q, k, v))
        for d_stats in (None, torch.ones_like(stats)):
            arguments = output.cos(), d_stats, *inputs, output, stats, text, 0.5, documents, [True, False, True]
            torch.library.opcheck(getattr(torch.ops.longstride, f"{impl}_backward").default, arguments)
            inputs = (x.detach() for x in (q, k, v))


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("options", [{}, {"documents": [4, 2, 3]}], ids=str)
@FAST
def test_training_keeps_the_inputs_the_output_and_the_stats(impl, options, dispatched):
    inputs = LSE.tensors(device=DEVICE)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x)
    with hooks, FlopCounterMode(display=False) if dispatched else nullcontext():
        output = attend(*inputs, HEADS, impl=impl, **options)
    rows = LSE.batch * len(HEADS) * LSE.n_q
    assert kept == [*(x.numel() for x in inputs), output.numel(), rows * (2 if impl == "blocked" else 1)]


@FAST
def test_sums_over_heads_that_share_keys_are_rounded_once(impl):
    inputs = Case([Local(3)] * 32, 1, 1, 9, 9, 4, 4, {}).tensors(torch.float16, DEVICE)
    slopes = torch.rand(1, 32, 9, 4, device=DEVICE).half()
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    (exact,) = torch.autograd.grad(attend(*doubles, Local(3), impl="reference"), doubles[2], slopes.double())
    with tiles_of(16, 16):
        (ours,) = torch.autograd.grad(attend(*inputs, Local(3), impl=impl), inputs[2], slopes)
    assert ((ours - exact) / exact).abs().max() < 1.5 * 2**-11


def test_calls_past_the_dispatcher_give_the_same():
    case = LAYOUTS["documents"]
    inputs = case.tensors(device=DEVICE)

    def results():
        output = attend(*inputs, HEADS, impl="triton", **case.options)
        return output, *torch.autograd.grad(output.sin().sum(), inputs)

    with tiles_of(16, 16), Ran() as ran:
        dispatched = results()
    assert {"longstride.triton_forward", "longstride.triton_backward"} <= set(ran.ops)
    with tiles_of(16, 16):
        assert all(torch.equal(x, y) for x, y in zip(results(), dispatched))


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


@MOST
def test_autocast_keeps_the_lse_in_float32(impl):
    q, k, v = LSE.tensors(device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        output, lse = attend(q, k, v, HEADS, impl=impl, return_lse=True)
    assert (output.dtype, lse.dtype) == (torch.float16, torch.float32)


def test_dense_lse_by_hand():
    q, k, v = (torch.tensor([[[[x], [y]]]]) for x, y in ((1.0, 2.0), (3.0, -1.0), (0.0, 1.0)))
    _, lse = attend(q, k, v, Dense(), return_lse=True)
    torch.testing.assert_close(lse[0, 0], torch.tensor([3.0, torch.logaddexp(torch.tensor(6.0), torch.tensor(-2.0))]))
