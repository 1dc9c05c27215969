import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstride.model.slots import Slots
from longstride.patterns import Block, Column, Dense, Local, Summary
from tests.strategies import patterns


@given(patterns(9), st.integers(1, 50))
def test_a_query_finds_each_key_it_sees_in_its_slot_and_no_other(pattern, context):
    head = Slots(pattern, context)
    kept = {}
    for query in range(context):
        slot = int(head.of(torch.tensor([query])))
        assert -1 <= slot < head.count
        if slot >= 0:
            kept[slot] = query
        found = head.seen(query).tolist()
        assert sorted(kept[slot] for slot in found) == [key for key in range(query + 1) if pattern.sees(query, key)]
        assert len(found) <= head.most


@given(patterns(9), st.integers(1, 50), st.data())
def test_lists_what_several_queries_see(pattern, context, data):
    head = Slots(pattern, context)
    first = data.draw(st.integers(0, context - 1))
    queries = torch.arange(first, data.draw(st.integers(first + 1, context)))
    most = head.most_between(first, int(queries[-1]))
    for query, row in zip(queries.tolist(), head.listed(queries)):
        assert sorted(row[row >= 0].tolist()) == sorted(head.seen(query).tolist())
        assert len(head.seen(query)) <= most <= head.most


@given(patterns(9), st.integers(1, 50), st.data())
def test_of_a_prompt_is_kept_what_later_queries_see(pattern, context, data):
    head = Slots(pattern, context)
    n = data.draw(st.integers(0, context))
    positions = head.kept(n)
    assert len(set(head.of(positions).tolist())) == len(positions) <= head.count
    needed = {key for query in range(n, context) for key in range(n) if pattern.sees(query, key)}
    assert needed <= set(positions.tolist())


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (Local(128), 129),
        (Block(128), 128),
        (Summary(128, 32), 96 * 32),
        (Column(128), 12_288),
        (Dense(), 12_288),
        (Block(128) | Summary(128, 32), 128 + 96 * 32),
        (Local(128) | Column(128), 12_288),
        (Local(200) | Block(128), 201),
    ],
)
def test_patterns_keep_what_they_need_and_unions_share(pattern, count):
    assert Slots(pattern, 12_288).count == count


def test_no_more_than_the_context_is_kept():
    assert Slots(Local(128), 50).count == 50


def test_a_column_reads_a_stride_of_what_is_kept():
    assert len(Slots(Column(128), 12_288).seen(12_287)) == 96
