"""Which tile of which document each program computes, where there are documents or fewer queries than keys.

The kernels read two tables: documents, and work items. A job of `jobs.py` is made for the longest document. For a shorter
one, the kernel has fewer and shorter lanes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention.kernels.jobs import Job, Pass
from longstride.attention.kernels.settings import padded
from longstride.attention.layout import layout_documents


class DocumentRow(NamedTuple):
    batch: int
    queries: int
    """Row of the document's first position among the queries; negative if its first positions have no query."""
    keys: int
    """The same among the keys."""
    n: int
    offset: int
    """Position of the document's first query."""


class LaneWork(NamedTuple):
    """A tile of whole lanes of one document: all that a kernel needs, in one row, so that a program can read it ahead."""

    job: int
    batch: int
    document: int
    """Row of the document's first position."""
    n: int
    first: int
    """Of the lanes."""
    together: int
    """How many lanes the tile has."""


class Documents(NamedTuple):
    rows: tuple[DocumentRow, ...]
    repeats: int
    """How many entries of the batch have these documents, from each one's `batch` on."""


def document_table(q: Sequence[int], k: Sequence[int], lengths: Sequence[int]) -> Documents | None:
    """Returns the documents of q and k, which are shapes; None if each row is one with as many queries as keys."""
    if q[2] == k[2] and not lengths:
        return None
    documents = layout_documents(q, k, lengths)
    rows = [
        DocumentRow(
            part.batch.start,
            part.queries.start - part.offset,
            part.keys.start,
            part.keys.stop - part.keys.start,
            part.offset,
        )
        for part in documents
    ]
    return Documents(tuple(rows), documents[0].batch.stop - documents[0].batch.start)


def key_items(pass_: Pass, documents: Documents, size: int, accumulate: bool) -> Tensor:
    """Returns a row (job, document, lane, first index) for each tile of `size` positions, int32 [items, 4].

    In the order of `primitives.read_tile`: the tiles with most work first. accumulate: without those that add nothing, since
    no query of their lane is `near` positions behind them.
    """
    n = torch.tensor([row.n for row in documents.rows])
    kept = []
    for index, job in enumerate(pass_.jobs):
        items = _lane_items(index, job, n, size)
        if accumulate:
            _, _, _, first = items.unbind(1)
            items = items[first + job.near < _item_lengths(job, n, items)]
        kept.append(items)
    return torch.cat(kept)


def query_items(pass_: Pass, documents: Documents, size: int, accumulate: bool) -> Tensor:
    """As `key_items`, without tiles that have no query; accumulate: without those whose queries see no key of their lane."""
    n = torch.tensor([row.n for row in documents.rows])
    offset = torch.tensor([row.offset for row in documents.rows])
    kept = []
    for index, job in enumerate(pass_.jobs):
        items = _lane_items(index, job, n, size)
        _, document, lane, first = items.unbind(1)
        last = lane * job.lane_stride + (first + size - 1) * job.index_stride
        sees = last >= offset[document]
        if accumulate:
            sees &= torch.minimum(first + size, _item_lengths(job, n, items)) > job.near
        kept.append(items[sees])
    return torch.cat(kept)


def lane_items(pass_: Pass, documents: Documents, size: int, accumulate: bool) -> Tensor:
    """Returns a row of `LaneWork` for each tile of `size` rows, int32 [items, 6].

    The documents have as many queries as keys. accumulate: without those in which no query sees a key.
    """
    n = torch.tensor([row.n for row in documents.rows])
    batch, start = (torch.tensor(column) for column in zip(*((row.batch, row.keys) for row in documents.rows)))
    found = []
    for index, job in enumerate(pass_.jobs):
        lanes, limit = _lanes(job, n)
        together = torch.tensor([size // padded(length, least=1) for length in limit.tolist()])
        tiles = -(-lanes // together)
        if accumulate:
            tiles[limit <= job.near] = 0
        document, tile = _numbered(tiles)
        own = together[document]
        found.append(_rows(index, batch[document], start[document], n[document], tile * own, own))
    return torch.cat(found)


def cell_items(pass_: Pass, documents: Documents, size: int) -> Tensor:
    """As `key_items`, for tiles of the summary cells that later lanes see; the index counts cells, and the lane is 0."""
    n = torch.tensor([row.n for row in documents.rows])
    found = []
    for index, job in enumerate(pass_.jobs):
        lanes, _ = _lanes(job, n)
        tiles = -(-(lanes - 1) * (job.lane_stride // job.block) * job.cells // size)
        document, tile = _numbered(tiles)
        found.append(_rows(index, document, torch.zeros_like(tile), tile * size))
    return torch.cat(found)


def _lane_items(index: int, job: Job, n: Tensor, size: int) -> Tensor:
    lanes, limit = _lanes(job, n)
    along = -(-limit // size)
    document, tile = _numbered(lanes * along)
    lanes, along = lanes[document], along[document]
    return _rows(index, document, lanes - 1 - tile % lanes, (along - 1 - tile // lanes) * size)


def _item_lengths(job: Job, n: Tensor, items: Tensor) -> Tensor:
    """Returns how long the lane of each item is."""
    _, document, lane, _ = items.unbind(1)
    return ((n[document] - 1 - lane * job.lane_stride) // job.index_stride + 1).clamp(max=job.limit)


def _lanes(job: Job, n: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many lanes a job has in documents of n positions, and how long they are."""
    return (-(-n // job.lane_stride)).clamp(max=job.lanes), (-(-n // job.index_stride)).clamp(max=job.limit)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the document of each tile, and its number there, for so many tiles of each document."""
    document = torch.arange(len(counts)).repeat_interleave(counts)
    return document, torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]


def _rows(index: int, *columns: Tensor) -> Tensor:
    return torch.stack([torch.full_like(columns[0], index), *columns], 1)
