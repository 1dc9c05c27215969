"""Few queries among many keys, whose keys are gathered, beside the oracle and the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride import attend
from longstride.attention import blocked, few_queries
from longstride.attention.few_queries import MOST
from longstride.patterns import Block, Column, Dense, Local, Summary
from tests.attention.layouts import Case
from tests.strategies import patterns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")


@pytest.fixture
def gathered(monkeypatch):
    """One entry for each call of the gathering forward."""
    found = []

    def watched(*arguments):
        found.append(arguments)
        return few_queries.attend_to_seen(*arguments)

    monkeypatch.setattr(blocked, "attend_to_seen", watched)
    return found


@st.composite
def cases(draw):
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_q = draw(st.integers(1, MOST + 1))
    n_k = n_q + draw(st.integers(MOST - 1, 80))
    one = patterns(24)
    heads = [draw(one)] * (kv_heads * group) if draw(st.booleans()) else [draw(one) for _ in range(kv_heads * group)]
    options = draw(
        st.sampled_from([{}, {"offset": n_k - n_q - 3}, {"documents": [7, n_k - 7]}, {"documents": [n_k - 2, 2]}])
    )
    return Case(
        heads, kv_heads, draw(st.integers(1, 2)), n_q, n_k, draw(st.integers(1, 6)), draw(st.integers(1, 6)), options
    )


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=30)
def test_agrees_with_the_oracle(case, dtype):
    case.check("blocked", dtype)


def test_few_are_gathered_and_many_are_not(gathered):
    q, k, v = torch.randn(3, 2, 3, 200, 8).unbind()
    for count in (1, MOST, MOST + 1, 200):
        attend(q[:, :, -count:], k, v, Local(9), impl="blocked")
    assert len(gathered) == 2


def test_the_keys_of_a_pattern_are_looked_up_once():
    q, k, v = torch.randn(3, 1, 4, 300, 8).unbind()
    few_queries._seen_keys.cache_clear()
    for _ in range(3):
        attend(q[:, :, -2:], k, v, [Local(9), Local(9), Column(7), Column(7)], impl="blocked")
    assert few_queries._seen_keys.cache_info().misses == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("pattern", [Local(20) | Column(30), Block(50) | Summary(50, 10), Dense()], ids=str)
def test_values_that_are_not_finite_reach_those_who_see_them(pattern, value, gathered):
    """Of three queries, each beside keys that only another one sees."""
    q, k, v = torch.randn(3, 1, 2, 90, 4).unbind()
    for key in (0, 30, 49, 59, 60, 72, 86, 87, 88, 89):
        for index in (1, 2):
            inputs = [q[:, :, -3:], k.clone(), v.clone()]
            inputs[index][:, :, key, 1] = value
            ours, theirs = (attend(*inputs, pattern, impl=impl) for impl in ("blocked", "reference"))
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert len(gathered) == 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("pattern", [Local(20) | Column(30), Block(50) | Summary(50, 10), Dense()], ids=str)
def test_what_is_not_finite_changes_no_bit_elsewhere(pattern, value):
    """Of other rows of the batch, of other heads, and of queries before it."""
    q, k, v = torch.randn(3, 2, 4, 300, 64).unbind()
    q, k = q[:, :, -8:], k[:, :2]
    before = attend(q, k, v[:, :2], pattern, impl="blocked", return_lse=True)
    for index in (0, 1):
        inputs = [k.clone(), v[:, :2].clone()]
        inputs[index][0, 1, 297] = value
        for ours, theirs in zip(attend(q, *inputs, pattern, impl="blocked", return_lse=True), before):
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[0, :2], theirs[0, :2])
            assert torch.equal(ours[0, 2:, :5], theirs[0, 2:, :5])


def test_positions_side_by_side_are_not_listed():
    """They would be many to keep, and to gather: Dense's grow with n."""
    for pattern in (Dense(), Local(60), Block(100)):
        for offset in (199, 190):
            positions, hidden, count = few_queries._seen_keys(pattern, 200, offset)
            assert positions == slice(200 - count, 200)
            assert (hidden is None) == (offset == 199)
    assert isinstance(few_queries._seen_keys(Column(7), 200, 199)[0], torch.Tensor)


def test_heads_are_computed_together_whose_keys_are_equally_spaced():
    def together(own, group, most=99):
        return list(few_queries._heads_together(own, group, most))

    assert together([0, 1, 2, 3], 2) == [([0, 1, 2, 3], slice(0, 2, 1))]
    assert together([1, 9, 17], 1) == [([1, 9, 17], slice(1, 25, 8))]
    assert together([0, 1, 2, 5], 2) == [([0, 1], slice(0, 1, 1)), ([2, 5], slice(1, 3, 1))]
    assert together([0, 1, 2, 3, 4], 1, most=2) == [
        ([0, 1], slice(0, 2, 1)),
        ([2, 3], slice(2, 4, 1)),
        ([4], slice(4, 5, 1)),
    ]
    assert together([3], 1, most=0) == [([3], slice(3, 4, 1))]


@pytest.mark.parametrize("heads", [[Local(9)] * 4, [Local(9), Column(7)] * 2, [Local(9)] * 3 + [Column(7)]], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_a_few_at_a_time(heads, kv_heads, monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 90, 8).unbind()
    inputs = q[:, :, -3:], k[:, :kv_heads], v[:, :kv_heads]
    for most in (0, 700, 2**21):
        monkeypatch.setattr(few_queries, "MOST_NUMBERS", most)
        ours, theirs = (attend(*inputs, heads, impl=impl) for impl in ("blocked", "reference"))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [1e3, 1e8, 1e30])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_gradients_where_scores_are_large(queries, scale):
    """There a rounding error of a score is a large factor of its weight, so forward's largest score is of no use."""
    k, v = torch.randn(2, 1, 4, 200, 32).unbind()
    q, slopes = torch.randn(2, 1, 4, queries, 32).unbind()

    def gradient(impl):
        values = v.clone().requires_grad_()
        output = attend(q, k, values, Local(50) | Column(13), impl=impl, scale=scale)
        return torch.autograd.grad(output, values, slopes)

    torch.testing.assert_close(gradient("blocked"), gradient("reference"))


def test_no_key_is_seen():
    q, k, v = torch.randn(3, 1, 2, 40, 4).unbind()
    output, lse = attend(q[:, :, 30:31], k, v, Summary(64, 8), impl="blocked", offset=30, return_lse=True)
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
