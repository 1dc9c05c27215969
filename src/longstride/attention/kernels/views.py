"""Views by which documents, and heads that share keys, are plain calls: the launches of `run.py`, Hopper's among them.

Documents of one length are a batch. Other documents are split into pieces: runs of one length that have many rows, and what
lies between these. Heads that share keys take turns: heads g, g + group, g + 2 * group and so on of the queries have as many
heads as the keys. Results by query, the lse, are contiguous in every call, so these are copied.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.patterns import notation

LEAST_ROWS = 2**16
"""Rows of keys in a batch from which heads take turns, and documents are a piece of their own: four tiles of 128 queries for
each processor of an H200. With fewer, one launch for all takes less time than several small ones. Estimated."""


def parts(
    tensors: Sequence[Tensor], documents: Sequence[int], pieces: bool = True
) -> Iterator[tuple[Sequence[Tensor], Sequence[int]]]:  # fmt: skip
    """Yields views of the tensors, of which q and k are the first, that are calls of their own, and their documents.

    Tensors [batch, heads, n] may become [batch, count, heads, n / count], for count documents. An empty gradient, which is
    not needed, stays as it is.
    """
    q, k = tensors[0].shape, tensors[1].shape
    count = equal_documents(q, k, documents)
    if count and all(_is_foldable(x) for x in tensors):
        yield [_folded(x, count) for x in tensors], ()
        return
    split = split_documents(q, k, documents) if pieces else ()
    for piece in split:
        yield from parts([piece.of(x) for x in tensors], piece.documents)
    if not split:
        yield tensors, documents


def equal_documents(q: Sequence[int], k: Sequence[int], documents: Sequence[int]) -> int:
    """Returns how many documents each row of q and k, which are shapes, has; 0 unless all are alike and have all queries."""
    return len(documents) if q[2] == k[2] == sum(documents) and len(set(documents)) == 1 else 0


def _is_foldable(x: Tensor) -> bool:
    """Whether documents of neighbouring rows of the batch are as far apart as those of one row."""
    return x.dim() < 4 or x.shape[0] <= 1 or x.stride(0) == x.shape[2] * x.stride(2)


def _folded(x: Tensor, count: int) -> Tensor:
    """[batch, heads, n, d] as the view [batch * count, heads, n / count, d]."""
    if x.dim() < 4:
        return torch.unflatten(x, 2, (count, -1)).transpose(1, 2) if x.dim() == 3 else x
    (batch, heads, n, d), (_, head, row, column) = x.shape, x.stride()
    return x.as_strided((batch * count, heads, n // count, d), (n // count * row, head, row, column))


class Piece(NamedTuple):
    """Some documents of a row, in every entry of the batch or in one."""

    entry: int | None
    first: int
    rows: int
    documents: tuple[int, ...]
    """Their lengths; none for one document."""

    def of(self, x: Tensor) -> Tensor:
        """Returns the view of x [batch, heads, n, ...]."""
        if x.dim() < 3:
            return x
        part = x.narrow(2, self.first, self.rows)
        return part if self.entry is None else part.narrow(0, self.entry, 1)


def split_documents(q: Sequence[int], k: Sequence[int], documents: Sequence[int]) -> Sequence[Piece]:
    """Returns the pieces that are calls of their own, of q and k, which are shapes; none if one call computes all.

    Several documents of one length fold in one entry of the batch, so there each entry is a piece.
    """
    return _pieces(k[0], k[1], tuple(documents), LEAST_ROWS) if q[2] == k[2] == sum(documents) else ()


@lru_cache(maxsize=256)
def _pieces(batch: int, heads: int, documents: tuple[int, ...], least: int) -> Sequence[Piece]:
    def is_large(run: Sequence[int]) -> bool:
        return (batch if len(run) == 1 else 1) * heads * sum(run) >= least

    found: list[Piece] = []
    first = 0
    runs = [tuple(run) for _, run in groupby(documents)]
    for large, some in groupby(runs, is_large):
        for lengths in some if large else [tuple(chain(*some))]:
            numbers = range(batch) if large and batch > 1 and len(lengths) > 1 else (None,)
            own = lengths if len(lengths) > 1 else ()
            found += [Piece(number, first, sum(lengths), own) for number in numbers]
            first += sum(lengths)
    return found if len(found) > 1 else ()


def turns(q: Tensor, k: Tensor) -> int:
    """Returns how many heads of q share keys, if they take turns; otherwise 1."""
    batch, heads, n, _ = k.shape
    return q.shape[1] // heads if q.shape[2] == n and batch * heads * n >= LEAST_ROWS else 1


def turn_heads(x: Tensor, group: int) -> tuple[Tensor, ...]:
    """Returns the views x[:, g::group] of x [batch, heads, n, d]."""
    # Faster than slices.
    return torch.unflatten(x, 1, (-1, group)).unbind(2) if x.dim() == 4 else (x,) * group


def turn_rows(rows: Tensor, group: int) -> Tensor:
    """Returns the view [group, ..., heads / group, n] of rows [..., heads, n]."""
    return torch.unflatten(rows, -2, (-1, group)).movedim(-2, 0)


@lru_cache(maxsize=256)
def turn_patterns(patterns: str, group: int) -> tuple[str, ...]:
    """Returns the patterns of the heads of each turn."""
    heads = notation.parse(patterns)
    return tuple(notation.write(heads[number::group]) for number in range(group))


def empty_in_order(x: Tensor, *shape: int) -> Tensor:
    """Returns an empty tensor [..., heads, n, d], of which heads and n have x's order in memory."""
    *first, heads, n, d = shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(*first, n, heads, d).transpose(-3, -2)
    return x.new_empty(shape)
