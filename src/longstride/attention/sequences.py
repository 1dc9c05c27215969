"""Which sequences of a head the blocked implementation computes together, and their rows in tensors [batch, heads, n, ...].

Whole rows of a batch, or one document of each, are slices. Short documents are many, and a call for each would take longer
than its pairs: those of similar length are padded to the longest of them. Padding comes after a document's own rows, so no
query of it sees a padded key; padded queries are left out of results, and add 0 to gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention.layout import Document, layout_documents

SHORT = 16
"""Documents of which so many fit the budget of positions are computed together. For longer ones padding takes more time than
a call for each."""
MOST_PADDED = 1.25
"""Rows of padded documents, as a multiple of those that are there."""


class Rows(NamedTuple):
    """Rows of some sequences: slices; or, for documents side by side, the batch entry and row of each, [documents, n]."""

    batch: slice | Tensor
    rows: slice | Tensor
    real: Tensor | None = None
    """Which rows are not padding, bool [documents, n]; None: all."""

    @property
    def is_view(self) -> bool:
        return isinstance(self.rows, slice)

    def load(self, x: Tensor, head: int, padding: float = 0) -> Tensor:
        """Returns a head's rows in the working dtype, [sequences, n, ...], contiguous."""
        found = x[self.batch, head, self.rows].to(working_dtype(x)).contiguous()
        return found if self.real is None else _fill(found, ~self.real, padding)

    def store(self, value: Tensor, x: Tensor, head: int) -> None:
        """Writes what is not padding."""
        if self.real is None:
            x[self.batch, head, self.rows] = value.to(x.dtype)
        else:
            batch, rows = (self.batch[self.real], self.rows[self.real])  # type: ignore[index]
            x[batch, head, rows] = value[self.real].to(x.dtype)


class Sequences(NamedTuple):
    """Sequences of one length. The queries are at the last of the n positions of the keys, from `offset` on."""

    queries: Rows
    keys: Rows
    n: int
    offset: int


def working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured, which cannot synchronize."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sequences(
    q: Sequence[int], k: Sequence[int], lengths: Sequence[int], positions: int, device: torch.device
) -> Iterator[Sequences]:  # fmt: skip
    """Yields all sequences with queries of q and k, which are shapes, about `positions` rows at a time."""
    short: list[Document] = []
    for part in layout_documents(q, k, lengths):
        if part.queries.start == part.queries.stop:
            continue
        rows = (part.batch.stop - part.batch.start) * part.n
        is_short = SHORT * part.n <= positions and 2 * rows < positions  # A batch with more rows is enough by itself.
        if lengths and not part.offset and is_short and not is_capturing(device):
            short.append(part)
            continue
        yield from _slices(part, positions)
    ones = sorted((one for part in short for one in _slices(part, 1)), key=lambda one: one.n)
    while ones:
        count = _count_together([one.n for one in ones[: positions // ones[0].n]], positions)
        together, ones = ones[:count], ones[count:]
        yield together[0] if count == 1 else _side_by_side(together, device)


def _slices(part: Document, positions: int) -> Iterator[Sequences]:
    at_once = max(1, positions // part.n)
    for start in range(part.batch.start, part.batch.stop, at_once):
        batch = slice(start, min(start + at_once, part.batch.stop))
        yield Sequences(Rows(batch, part.queries), Rows(batch, part.keys), part.n, part.offset)


def _count_together(lengths: Sequence[int], positions: int) -> int:
    """Returns how many of the first documents, shortest first, are padded to one length."""
    total, count = 0, 1
    for index, length in enumerate(lengths, 1):
        total += length
        padded = index * length
        if padded <= positions and padded <= MOST_PADDED * total:
            count = index
    return count


def _side_by_side(ones: list[Sequences], device: torch.device) -> Sequences:
    n = ones[-1].n
    numbers = [(one.keys.batch.start, one.queries.rows.start, one.keys.rows.start, one.n) for one in ones]  # type: ignore[union-attr]
    batch, query, key, length = torch.tensor(numbers, device=device).unsqueeze(2).unbind(1)
    index = torch.arange(n, device=device)
    real = None if ones[0].n == n else index < length
    index = index.minimum(length - 1)
    batch = batch.expand(-1, n)
    return Sequences(Rows(batch, query + index, real), Rows(batch, key + index, real), n, 0)


def _fill(rows: Tensor, where: Tensor, value: float) -> Tensor:
    return rows.masked_fill_(where.view(*where.shape, *[1] * (rows.dim() - 2)), value)
