"""NaN, infinity and scores that overflow: what attend's docstring says of them, for each implementation."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from longstride import attend
from longstride.patterns import Block, Column, Dense, Local, Summary, fixed, strided, union
from tests.attention.cases import cases
from tests.attention.error_rule import results
from tests.attention.plans import tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
KINDS = [Local(3), Column(3), Block(5), Summary(5, 2), union(*strided(3)), union(*fixed(5, 2)), Dense()]
BAD = list(product(range(3), [torch.nan, torch.inf, -torch.inf]))
"""Which of q, k and v has which number."""
NOT_IN_VALUES = [0, 1, 2, 3, 4, 5, len(BAD)]
"""Entries of the batch in which v has none of them; the last has none at all."""
NAMES = "output", "dq", "dk", "dv"


def oracle(q, k, v, slopes, pattern, scale=None):
    """Output and gradients in plain PyTorch, each query with the keys that it sees and no others."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    mask = pattern.mask(q.shape[2], q.device)
    rows = []
    for query, seen in enumerate(mask):
        keys, values = (x[:, :, seen.nonzero().squeeze(1)] for x in inputs[1:])
        scores = inputs[0][:, :, [query]] @ keys.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        none = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
        rows.append(weights @ values if seen.any() else 0 * inputs[2][:, :, [query]].detach().nan_to_num())
    output = torch.cat(rows, 2)
    return [output.detach(), *torch.autograd.grad(output, inputs, slopes.to(output.dtype))]


def inputs_with(entries, n=13, d=2, dtype=torch.float32):
    """q, k, v and slopes; `entries` change what they have, one in each entry of the batch, and the last has no change."""
    torch.manual_seed(0)
    tensors = [torch.randn(len(entries) + 1, 1, n, d).to(DEVICE, dtype) for _ in range(4)]
    for entry, change in enumerate(entries):
        change(*(x[entry, 0] for x in tensors[:3]))
    return tensors


def one_bad_number(n, which, value):
    def change(*tensors):
        tensors[which][n // 3, 1] = value

    return change


def bad_inputs(n=13, d=2, dtype=torch.float32):
    return inputs_with([one_bad_number(n, which, value) for which, value in BAD], n, d, dtype)


def too_large(dtype=torch.float32):
    """Changes that make scores overflow: of one key to +inf, to -inf, of the first half, of all keys, of one query."""
    large = 0.9 * torch.finfo(dtype).max

    def change(keys, to):
        def make(q, k, v):
            q.abs_().add_(1).mul_(50)
            k[keys(len(k))] = to

        return make

    def large_query(q, k, v):
        k.mul_(50)
        q[len(q) // 3] = large

    return [
        change(lambda n: n // 3, large),
        change(lambda n: n // 3, -large),
        change(lambda n: slice(n // 2), -large),
        change(lambda n: slice(n), -large),
        large_query,
    ]


ALL_NEGATIVE = 3


def assert_same(ours, theirs, which=NAMES):
    """The same numbers, NaN and infinities included."""
    for name, our, true in zip(NAMES, ours, theirs):
        if name in which:
            close = 1e-4 if our.dtype in (torch.float32, torch.float64) else 2e-2
            text = f"{name}: {{}}".format
            torch.testing.assert_close(our, true, rtol=close, atol=close, equal_nan=True, check_dtype=False, msg=text)


def assert_same_on_triton(data, pattern, exact, scale=None):
    """What holds for whole tiles: outputs of the entries in `exact`, NaN wherever the oracle has it, other entries' bits."""
    ours, theirs = results("triton", *data, pattern, scale), oracle(*(x.float() for x in data), pattern, scale)
    assert_same([x[exact] for x in ours], [x[exact] for x in theirs], ("output",))
    for our, true in zip(ours, theirs):
        assert not our[~true.isfinite()].isfinite().any()
    for our, alone in zip(ours, results("triton", *(x[-1:] for x in data), pattern, scale)):
        assert torch.equal(our[-1:], alone)
    return ours, theirs


EXACT = pytest.mark.parametrize("impl", ["reference", "blocked"])


@EXACT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("pattern", KINDS, ids=repr)
def test_one_bad_number(impl, pattern, dtype):
    data = bad_inputs(dtype=dtype)
    assert_same(results(impl, *data, pattern), oracle(*(x.float() for x in data), pattern))


@EXACT
@pytest.mark.parametrize("pattern", KINDS, ids=repr)
def test_scores_that_overflow(impl, pattern):
    for dtype in (torch.float32, torch.float64):
        data = inputs_with(too_large(dtype), dtype=dtype)
        ours = results(impl, *data, pattern)
        assert_same(ours, oracle(*data, pattern))
        assert not any(x[ALL_NEGATIVE].any() for x in ours)


@EXACT
def test_a_negative_scale(impl):
    for data in (bad_inputs(), inputs_with(too_large())):
        assert_same(results(impl, *data, KINDS[4], -0.5), oracle(*data, KINDS[4], -0.5))


@EXACT
@pytest.mark.parametrize("scale", [0.0, 1e-60])
def test_a_scale_of_zero(impl, scale):
    """Times 0 an infinite score is NaN, and NaN remains; also in products that are large enough for a BLAS."""
    for pattern in (Local(30), KINDS[4]):
        for data in (bad_inputs(70, 16), inputs_with(too_large())):
            assert_same(results(impl, *data, pattern, scale), oracle(*data, pattern, scale))


@EXACT
def test_finite_numbers_that_add_up_to_nan(impl):
    """Products of opposite signs that overflow: what that is depends on the order of sums, but not who is affected."""
    data = inputs_with([])
    data[0].abs_().add_(1).mul_(50)
    before = results(impl, *data, Local(3))
    data[1][:, :, 6] = torch.tensor([3e38, -3e38])
    after = results(impl, *data, Local(3))
    for x, y, first in zip(before, after, (6, 6, 3, 3)):
        unaffected = [*range(first), *range(10, 13)]
        torch.testing.assert_close(x[:, :, unaffected], y[:, :, unaffected])


@given(cases(longest_n=40), st.integers(0, 2), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=5))
@settings(max_examples=30)
def test_blocked_is_the_reference(case, which, places):
    """Anywhere, several at once, with incoming gradients that are not finite as well: then inf - inf may be inf or NaN."""
    pattern, batch, heads, n, d_qk, d_v = case
    torch.manual_seed(0)
    data = [torch.randn(batch, heads, n, d) for d in (d_qk, d_qk, d_v)]
    for kind, place in places:
        data[which].view(-1)[place % data[which].numel()] = BAD[kind][1]

    def both(impl):
        inputs = [x.clone().requires_grad_() for x in data]
        output = attend(*inputs, pattern, impl=impl)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    ours, theirs = both("blocked"), both("reference")
    assert_same(ours, theirs, ("output",))
    for our, true in zip(ours, theirs):
        assert torch.equal(our.isfinite(), true.isfinite())
    assert_same([x.nan_to_num(0, 0, 0) for x in ours], [x.nan_to_num(0, 0, 0) for x in theirs])


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_no_query_sees_changes_no_bit(which):
    """Position 7 of Summary(5, 2) is no cell: its key and value are seen by none, and its query sees cell 3 and 4."""
    data = inputs_with([])
    before = results("blocked", *data, Summary(5, 2))
    data[which][:, :, 7] = torch.nan
    after = results("blocked", *data, Summary(5, 2))
    others = [*range(7), *range(8, 13)]
    if which in (1, 2):
        assert all(torch.equal(x, y) for x, y in zip(before, after))
    for x, y in zip(before[:2], after[:2]):
        assert torch.equal(x[:, :, others], y[:, :, others])
    for x, y in zip(before[2:], after[2:]):
        assert torch.equal(x[:, :, 8:], y[:, :, 8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", KINDS, ids=repr)
def test_one_bad_number_on_triton(pattern, dtype):
    assert_same_on_triton(bad_inputs(dtype=dtype), pattern, exact=NOT_IN_VALUES)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_on_triton(scale):
    for pattern in (KINDS[0], KINDS[4]):
        assert_same_on_triton(bad_inputs(), pattern, exact=NOT_IN_VALUES, scale=scale)


@pytest.mark.parametrize("pattern", KINDS, ids=repr)
def test_scores_that_overflow_on_triton(pattern):
    ours, theirs = assert_same_on_triton(inputs_with(too_large()), pattern, exact=slice(None))
    for entry in range(1, ALL_NEGATIVE + 1):  # Those that have no NaN: gradients are right, too.
        assert_same([x[entry] for x in ours], [x[entry] for x in theirs])


@pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_the_lse_of_scores_that_are_not_finite(impl, value):
    q, k, v = (torch.ones(1, 1, 4, 2, device=DEVICE) for _ in range(3))
    k[:, :, 1] = value
    _, lse = attend(q, k, v, Local(1), impl=impl, return_lse=True)
    bad = lse[0, 0, 1:3]
    assert (bad == torch.inf).all() if impl == "reference" and value == torch.inf else bad.isnan().all()
    assert lse[0, 0, ::3].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
@pytest.mark.parametrize("pattern", [Dense(), Local(2) | Column(4)], ids=repr)
def test_many_scores_of_minus_infinity_before_others(impl, pattern):
    """Whole tiles of them, and whole leaves of a union."""

    def recent(q, k, v):
        q.abs_().add_(1).mul_(50)
        k[4:] = -3e38

    data = inputs_with([too_large()[2], recent], n=40)
    with tiles_of(16, 16):
        assert_same(results(impl, *data, pattern), oracle(*data, pattern))


PAPER = [Local(128), Local(300), Column(8), Block(128), Block(300), Summary(128, 32), Dense()]
PAPER += [union(*strided(128)), union(*strided(16)), union(*fixed(128, 32)), union(*fixed(96, 8))]


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PAPER, ids=repr)
def test_on_a_gpu(pattern, dtype):
    """At sizes that the kernels for one architecture take."""
    assert_same_on_triton(bad_inputs(600, 64, dtype), pattern, exact=NOT_IN_VALUES)
    if dtype == torch.bfloat16:
        ours, _ = assert_same_on_triton(inputs_with(too_large(dtype), 600, 64, dtype), pattern, exact=slice(None))
        assert not any(x[ALL_NEGATIVE].any() for x in ours)
