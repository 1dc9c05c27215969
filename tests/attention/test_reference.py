import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from longstride import attend
from longstride.patterns import Column, Dense, Local, Summary, fixed, union
from tests.strategies import patterns


def by_hand(q, k, v, pattern, scale):
    """Equation 2 of the paper, one query and one key at a time."""
    output = torch.zeros_like(v)
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if pattern.sees(i, j)]
        if keys:
            weights = torch.stack([q[i] @ k[j] * scale for j in keys]).softmax(0)
            output[i] = sum(weight * v[j] for weight, j in zip(weights, keys))
    return output


@given(patterns(10), st.integers(1, 20))
@settings(max_examples=60)
def test_is_the_papers_equation(pattern, n):
    q, k, v = torch.randn(n, 3).double(), torch.randn(n, 3).double(), torch.randn(n, 2).double()
    output = attend(q[None, None], k[None, None], v[None, None], pattern, scale=0.7, impl="reference")
    torch.testing.assert_close(output[0, 0], by_hand(q, k, v, pattern, 0.7))


def test_dense_is_sdpa():
    q, k, v = torch.randn(3, 2, 4, 33, 8).double()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, Dense(), impl="reference"), expected)


@pytest.mark.parametrize("pattern", [Local(2) | Column(3), union(*fixed(4, 1)), Summary(4, 1)], ids=repr)
def test_differentiates_twice(pattern):
    inputs = [torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(q, k, v):
        return attend(q, k, v, pattern, impl="reference")

    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_a_query_without_keys_gets_nothing():
    q, k, v = (torch.randn(1, 1, 6, 2, requires_grad=True) for _ in range(3))
    output = attend(q, k, v, Summary(4, 1), impl="reference")
    assert (output[0, 0, :3] == 0).all()
    assert (output[0, 0, 3:] != 0).all()
    output.sum().backward()
    assert q.grad is not None
    assert (q.grad[0, 0, :3] == 0).all()
    assert q.grad.isfinite().all()
