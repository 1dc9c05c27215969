"""Sequences that are computed together: every row once, whatever documents there are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstride import attend
from longstride.attention import blocked
from longstride.attention.sequences import MOST_PADDED, sequences
from longstride.patterns import Block, Column, Dense, Local, Summary

CPU = torch.device("cpu")
PATTERN = Local(5) | Column(4)


@st.composite
def layouts(draw):
    """Batch, n_q, n_k and lengths of documents."""
    batch, n = draw(st.integers(1, 3)), draw(st.integers(1, 60))
    n_q = draw(st.sampled_from([n, max(1, n // 2), 1]))
    rows = []
    for _ in range(draw(st.sampled_from([1, batch]))):
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=12))) if n > 1 else []
        rows.append([b - a for a, b in zip([0, *cuts], [*cuts, n])])
    if all(row == rows[0] for row in rows):
        rows = rows[:1]
    return batch, n_q, n, [length for row in rows for length in row] if len(rows) in (1, batch) else rows[0]


def own_rows(part, rows, n):
    """Batch entry and row of each sequence's rows; -1 for padding."""
    if rows.is_view:
        entries = range(rows.batch.start, rows.batch.stop)
        return [[(entry, row) for row in range(rows.rows.start, rows.rows.stop)] for entry in entries]
    real = torch.ones_like(rows.rows, dtype=torch.bool) if rows.real is None else rows.real
    return [
        [(entry, row) for entry, row, there in zip(*parts) if there]
        for parts in zip(rows.batch.tolist(), rows.rows.tolist(), real.tolist())
    ]


@given(layouts(), st.sampled_from([16, 40, 8192]))
def test_every_query_is_in_one_sequence(layout, positions):
    batch, n_q, n, lengths = layout
    found, total, padded = [], 0, 0
    for part in sequences((batch, 2, n_q, 8), (batch, 2, n, 8), lengths, positions, CPU):
        queries, keys = own_rows(part, part.queries, part.n), own_rows(part, part.keys, part.n)
        for own, others in zip(queries, keys):
            found += own
            # Queries are at the last positions of their keys.
            assert [(entry, row + n - n_q) for entry, row in own] == others[len(others) - len(own) :]
        if not part.keys.is_view:
            assert len(queries) * part.n <= max(positions, part.n)
            total, padded = total + sum(map(len, keys)), padded + len(keys) * part.n
    assert sorted(found) == [(entry, row) for entry in range(batch) for row in range(n_q)]
    assert padded <= MOST_PADDED * total


def test_a_batch_of_many_rows_is_sliced():
    """A document of each row: no padding, and no index to gather them by."""
    for batch, slices in ((64, True), (63, False)):
        shape = batch, 2, 128, 8
        found = list(sequences(shape, shape, [64, 64], 8192, CPU))
        assert all(part.keys.is_view == slices for part in found)
        assert sum(len(own_rows(part, part.queries, part.n)) for part in found) == 2 * batch


def test_short_documents_take_few_calls(monkeypatch):
    calls = []
    original = blocked._forward_head

    def counted(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(blocked, "_forward_head", counted)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 25, (300,), generator=generator).tolist()
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 4).unbind()
    attend(q, k, v, PATTERN, documents=lengths, impl="blocked")
    assert len(calls) <= 2 * 8


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("pattern", [PATTERN, Block(4) | Summary(4, 2)], ids=str)
def test_a_document_that_is_not_finite_changes_no_bit_of_others(pattern, value):
    """Although all are computed together, of which some are padded."""
    lengths = [9, 12, 11, 10, 12, 3]
    inputs = torch.randn(4, 1, 4, sum(lengths), 6)

    def results(x):
        leaves = [part.clone().requires_grad_() for part in (x[0], x[1, :, :2], x[2, :, :2])]
        output, lse = attend(*leaves, pattern, documents=lengths, impl="blocked", return_lse=True)
        return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, x[3])]

    before = results(inputs)
    start = 0
    for length in lengths:
        end = start + length
        for index in range(4):
            other = inputs.clone()
            other[index, :, :, start + length // 2] = value
            alone = [x[:, :, start:end] for x in other]
            for ours, theirs in zip(results(other), before):
                for part in (slice(0, start), slice(end, None)):
                    assert torch.equal(ours[:, :, part], theirs[:, :, part])
            leaves = [alone[0].clone(), alone[1][:, :2].clone(), alone[2][:, :2].clone()]
            own = attend(*leaves, pattern, impl="reference")
            torch.testing.assert_close(results(other)[0][:, :, start:end], own, equal_nan=True)
        start = end


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("pattern", [PATTERN, Block(4) | Summary(4, 2), Dense()], ids=str)
def test_what_is_not_finite_changes_no_bit_of_queries_before_it(pattern, value):
    """Also in its own document, which is computed again."""
    lengths, last = [9, 21, 30, 3], 28
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 4).unbind()
    before = attend(q, k, v, pattern, documents=lengths, impl="blocked", return_lse=True)
    for changed in (k, v):
        changed[:, :, last] = value
    for ours, theirs in zip(attend(q, k, v, pattern, documents=lengths, impl="blocked", return_lse=True), before):
        assert torch.equal(ours[:, :, :last], theirs[:, :, :last])


def test_padding_adds_nothing_to_a_key_of_weight_0():
    """A query of padding is 0, and 0 * inf is NaN, where those of the document have scores of -inf."""
    lengths = [8, 9]
    q, k, v, slopes = torch.randn(4, 1, 1, sum(lengths), 4).unbind()
    q = q.abs()
    k[:, :, 6, 0] = -torch.inf  # Of the first document, whose padded query 8 sees it.
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ours, theirs = (
        torch.autograd.grad(attend(*leaves, Column(2), documents=lengths, impl=impl), leaves, slopes)
        for impl in ("blocked", "reference")
    )
    assert ours[0].isnan().any()
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x, y, equal_nan=True)
