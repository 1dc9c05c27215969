"""Which tile of which document each program computes, where there are documents or fewer queries than keys.

The kernels read two tables: documents, and work items. A job of `jobs.py` is made for the longest document. For a shorter
one, the kernel has fewer and shorter lanes.
"""

from collections.abc import Callable, Sequence
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


class TileWork(NamedTuple):
    """A tile of positions in a lane of a document, or of summary cells that later lanes see; the lane of these is 0."""

    job: int
    document: int
    lane: int
    first: int
    """Index of its first position in the lane, or of its first cell."""


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


class WalkTile(NamedTuple):
    """A tile of a walk over all documents of a row; or one before a document, which has no rows."""

    batch: int
    tile: int
    """Its number in the document, below 0 for those before it."""
    first: int
    """Row of its first position; for those before a document, rows that are not there."""
    rows: int
    """How many of its rows are the document's."""


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
        DocumentRow(part.batch.start, part.queries.start - part.offset, part.keys.start, part.n, part.offset)
        for part in documents
    ]
    return Documents(tuple(rows), documents[0].batch.stop - documents[0].batch.start)


def tile_items(pass_: Pass, documents: Documents, size: int, accumulate: bool, of_keys: bool) -> Tensor:
    """Returns a row of `TileWork` for each tile of `size` queries, or keys, int32 [items, fields].

    In the order of `primitives.read_tile`: the tiles with most work first. Tiles of queries have at least one that is there.
    accumulate: at least one also sees a key of its lane, or is a key that a query of its lane sees.
    """
    *_, n, offset = torch.tensor(documents.rows).unbind(1)

    def of_job(job: Job) -> Tensor:
        lanes, limit = _lanes(job, n)
        along = -(-limit // size)
        document, tile = _numbered(lanes * along)
        lane = lanes[document] - 1 - tile % lanes[document]
        first = (along[document] - 1 - tile // lanes[document]) * size
        start = lane * job.lane_stride
        length = ((n[document] - 1 - start) // job.index_stride + 1).clamp(max=job.limit)
        needed = (start + (first + size - 1) * job.index_stride >= offset[document]) | of_keys
        if accumulate:
            farthest = length - first if of_keys else torch.minimum(first + size, length)
            needed &= farthest > job.near
        return torch.stack([document, lane, first], 1)[needed]

    return _of_all_jobs(pass_, of_job)


def lane_items(pass_: Pass, documents: Documents, size: int, accumulate: bool) -> Tensor:
    """Returns a row of `LaneWork` for each tile of `size` rows, int32 [items, fields].

    The documents have as many queries as keys. accumulate: without those in which no query sees a key.
    """
    batch, _, start, n, _ = torch.tensor(documents.rows).unbind(1)

    def of_job(job: Job) -> Tensor:
        lanes, limit = _lanes(job, n)
        together = torch.tensor([size // padded(length, least=1) for length in limit.tolist()])
        tiles = -(-lanes // together)
        if accumulate:
            tiles[limit <= job.near] = 0
        document, tile = _numbered(tiles)
        own = together[document]
        return torch.stack([batch[document], start[document], n[document], tile * own, own], 1)

    return _of_all_jobs(pass_, of_job)


def cell_items(pass_: Pass, documents: Documents, size: int) -> Tensor:
    """Returns a row of `TileWork` for each tile of `size` summary cells that later lanes see."""
    *_, n, _ = torch.tensor(documents.rows).unbind(1)

    def of_job(job: Job) -> Tensor:
        lanes, _ = _lanes(job, n)
        tiles = -(-(lanes - 1) * (job.lane_stride // job.block) * job.cells // size)
        document, tile = _numbered(tiles)
        return torch.stack([document, torch.zeros_like(tile), tile * size], 1)

    return _of_all_jobs(pass_, of_job)


def walk_tiles(documents: Documents, size: int, back: int) -> Tensor:
    """Returns a row of `WalkTile` for each tile of `size` positions, and `back` before each document, int32 [tiles, fields].

    The documents have as many queries as keys.
    """
    batch, _, start, n, _ = torch.tensor(documents.rows, dtype=torch.int32).unbind(1)
    document, tile = _numbered(-(-n // size) + back)
    tile -= back
    first = torch.where(tile < 0, -size, start[document] + tile * size)
    rows = torch.where(tile < 0, 0, (n[document] - tile * size).clamp(max=size))
    return torch.stack([batch[document], tile, first, rows], 1).int()


def _lanes(job: Job, n: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many lanes a job has in documents of n positions, and how long they are."""
    return (-(-n // job.lane_stride)).clamp(max=job.lanes), (-(-n // job.index_stride)).clamp(max=job.limit)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the document of each tile, and its number there, for so many tiles of each document."""
    document = torch.arange(len(counts)).repeat_interleave(counts)
    return document, torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]


def _of_all_jobs(pass_: Pass, of_job: Callable[[Job], Tensor]) -> Tensor:
    """Returns the rows of each job, after its index. Those of jobs that differ in no field that counts are made once."""
    rows: dict[Job, Tensor] = {}
    found = []
    for index, job in enumerate(pass_.jobs):
        of_any_head = job._replace(head=0, first_cell=0)
        if of_any_head not in rows:
            rows[of_any_head] = of_job(of_any_head)
        found.append(torch.nn.functional.pad(rows[of_any_head], (1, 0), value=index))
    return torch.cat(found)
