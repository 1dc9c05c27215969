"""How queries and keys lie: fewer heads of keys than of queries, fewer queries than keys, several documents in a row.

Shapes: q [batch, heads_q, n_q, d_qk]; k [batch, heads_kv, n_k, d_qk]; v [batch, heads_kv, n_k, d_v]. Query head h has the
keys of head h // (heads_q / heads_kv). The queries are at the last n_q of the n_k positions.

`documents` are lengths that add up to n_k, for all rows; or to batch * n_k, one row after the other. Without any, a row is
one document.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Document(NamedTuple):
    """A part of some rows that attends to itself: slices of the batch, of the queries and of the keys."""

    batch: slice
    queries: slice
    keys: slice
    offset: int
    """Position of the first query among the keys."""


def layout_documents(q: Sequence[int], k: Sequence[int], lengths: Sequence[int]) -> list[Document]:
    """Returns the documents of q and k, which are shapes. Some may have no queries."""
    batch, n_k = k[0], k[2]
    offset = n_k - q[2]
    if sum(lengths) <= n_k:
        return _documents(slice(0, batch), lengths or [n_k], offset)
    rows: list[list[int]] = [[] for _ in range(batch)]
    total = 0
    for length in lengths:
        rows[total // n_k].append(length)
        total += length
    return [part for row, some in enumerate(rows) for part in _documents(slice(row, row + 1), some, offset)]


def _documents(batch: slice, lengths: Sequence[int], offset: int) -> list[Document]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    found = []
    for start, end in pairwise(ends):
        first, last = max(start, offset), max(end, offset)
        found.append(Document(batch, slice(first - offset, last - offset), slice(start, end), min(first, end) - start))
    return found
