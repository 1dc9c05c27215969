"""Patterns, shapes and tensors for comparisons with the oracle."""

import torch
from hypothesis import strategies as st

from tests.strategies import patterns


@st.composite
def cases(draw, longest_n=130, longest_stride=24):
    """(pattern or patterns, batch, heads, n, d_qk, d_v)"""
    heads = draw(st.integers(1, 3))
    one = patterns(longest_stride)
    pattern = draw(st.one_of(one, st.lists(one, min_size=heads, max_size=heads)))
    n = draw(st.one_of(st.just(1), st.integers(1, longest_n)))
    return pattern, draw(st.integers(1, 2)), heads, n, draw(st.integers(1, 9)), draw(st.integers(1, 9))


def tensors(batch, heads, n, d_qk, d_v, dtype=torch.float32):
    """q, k, v, and a gradient of the output, the same for the same shape."""
    torch.manual_seed(0)
    return (torch.randn(batch, heads, n, d).to(dtype) for d in (d_qk, d_qk, d_v, d_v))
