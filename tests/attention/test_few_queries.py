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
    """Whether each call of the gathering forward gave a result."""
    found = []

    def watched(*arguments):
        result = few_queries.attend_to_seen(*arguments)
        found.append(result is not None)
        return result

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
    assert gathered == [True, True]


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
    assert False in gathered  # What comes of masked pairs is computed another way.


def test_no_key_is_seen():
    q, k, v = torch.randn(3, 1, 2, 40, 4).unbind()
    output, lse = attend(q[:, :, 30:31], k, v, Summary(64, 8), impl="blocked", offset=30, return_lse=True)
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
