"""One query with cached keys, against the oracle."""

import pytest
import torch

from longstride.attention.reference import attend_reference
from longstride.model.decode import decode, views
from longstride.model.slots import slots
from longstride.patterns import Block, Column, Dense, Local, Summary

N, BATCH, D = 29, 3, 8
CPU = torch.device("cpu")
HEADS = [
    (Dense(), Dense()),
    (Local(4), Summary(6, 2)),
    (Column(7), Block(5)),
    (Local(3) | Summary(6, 2), Summary(6, 2, 1)),
    (Column(14), Column(14)),
]


def filled(patterns, keys, last):
    """The cache, [batch, heads * slots, d], after the keys up to `last` were stored one after the other."""
    heads = [slots(pattern, N) for pattern in patterns]
    most = max(head.count for head in heads)
    cached = torch.full((BATCH, len(heads), most, keys.shape[-1]), 1e3)
    for index, head in enumerate(heads):
        for position in range(last + 1):
            slot = int(head.of(torch.tensor([position])))
            if slot >= 0:
                cached[:, index, slot] = keys[:, index, position]
    return cached.flatten(1, 2), heads, most


@pytest.mark.parametrize("first", [0, 1, 12, 21])
@pytest.mark.parametrize("patterns", HEADS, ids=str)
def test_equals_the_oracle(patterns, first):
    """Slots that a query does not see have large numbers in them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, 2, N, D).unbind()
    wanted = attend_reference(q, k, v, patterns, 0.3)
    positions = range(first, first + 8)
    for at, position in enumerate(positions):
        (keys, heads, most), (values, _, _) = filled(patterns, k, position), filled(patterns, v, position)
        view = views(heads, most, positions, BATCH, CPU)[at]
        out = torch.full((BATCH * 2, 1, D), torch.nan)
        decode(q[:, :, position].reshape(-1, 1, D), keys, values, view, 0.3, out)
        torch.testing.assert_close(out.view(BATCH, 2, D), wanted[:, :, position], atol=1e-5, rtol=0)


def test_slots_are_copied_only_where_few_are_seen():
    dense, column = slots(Dense(), N), slots(Column(7), N)
    assert all(view.listed is None for view in views([dense, dense], N, range(5, 9), 1, CPU))
    listed = views([column, column], N, range(15, 17), 1, CPU)[0].listed
    assert listed.tolist() == [15, 8, 1, N + 15, N + 8, N + 1]


def test_a_head_that_keeps_and_sees_nothing_yet():
    heads = [slots(Local(3), N), slots(Summary(6, 2), N)]
    early, late = (views(heads, 13, range(at, at + 1), 2, CPU)[0] for at in (2, 5))
    assert early.keeping.tolist() == [0]
    assert early.blind.flatten().tolist() == [False, True, False, True]
    assert late.keeping is None
    assert late.blind is None
