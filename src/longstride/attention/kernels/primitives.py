"""Shared by all kernels: where a tile lies, which pairs count, and rows of a matrix as tiles.

A position in the sequence is 32 bits; an address is 64. Rows that may overrun are masked, and so is the part of a row
between the head's dimension and the power of two above it.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.attention.kernels.arguments import Matrix
from longstride.attention.kernels.jobs import Exclusion, Job
from longstride.attention.kernels.work import DocumentRow, LaneWork, TileWork

JOB_FIELDS = tl.constexpr(len(Job._fields))
EXCLUSION_FIELDS = tl.constexpr(len(Exclusion._fields))
DOCUMENT_FIELDS = tl.constexpr(len(DocumentRow._fields))
TILE_WORK_FIELDS = tl.constexpr(len(TileWork._fields))
LANE_WORK_FIELDS = tl.constexpr(len(LaneWork._fields))
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every finite score: where a running maximum begins, so that it is finite, and a score of -inf has weight 0."""
PRECISION = tl.constexpr("ieee")
"""Of products of float32. Not tf32x3: with it backward_dkv is wrong on a GPU (Triton 3.6); docs/log.md has what was seen."""


class Tile(NamedTuple):
    """The tile of a program: positions start + (first + 0, 1, 2, ...) * step of a lane."""

    batch: Any
    index: Any
    """Of the job."""
    lane: Any
    start: Any
    first: Any
    length: Any
    """Of the lane."""
    queries: Any
    keys: Any
    """Rows of the document's first position among the queries, where it may be negative, and among the keys."""
    n: Any
    """Of the document."""
    offset: Any
    """Position of the document's first query."""


class Rows(NamedTuple):
    """Rows of a head: positions start + offset. The start is one number, so that in a loop where only it moves, addresses
    cost one addition each. Only `valid` rows are there."""

    start: Any
    offset: Any
    valid: Any


@triton.jit
def read_job(jobs, index):
    """The head is 64 bits, since a stride times it may be."""
    row = jobs + index * JOB_FIELDS
    return Job(
        tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10),
    )  # fmt: skip


@triton.jit
def read_tile(tables, sizes, SIZE: tl.constexpr, VARIED: tl.constexpr):
    """The job of a program, and its tile of SIZE positions; that begins past the lane's end if there is no such tile.

    Neighbouring programs have neighbouring lanes, which lie side by side in memory, and the tiles with most work come first.
    VARIED: the tile is a row of `work.TileWork`, and the job that of the longest document, cut to this one.
    """
    program = tl.program_id(0)
    if VARIED:
        item = tables.work + program % sizes.tiles * TILE_WORK_FIELDS
        index, lane, first = tl.load(item), tl.load(item + 2), tl.load(item + 3)
        document = tables.documents + tl.load(item + 1) * DOCUMENT_FIELDS
        batch = (program // sizes.tiles + tl.load(document)).to(tl.int64)
        queries, keys = tl.load(document + 1), tl.load(document + 2)
        n, offset = tl.load(document + 3), tl.load(document + 4)
        longest = read_job(tables.jobs, index)
        lanes = tl.minimum(longest.lanes, tl.cdiv(n, longest.lane_stride))
        limit = tl.minimum(longest.limit, tl.cdiv(n, longest.index_stride))
        job = Job(
            longest.head, lanes, longest.lane_stride, longest.index_stride, limit, longest.near, longest.far, longest.own,
            longest.block, longest.cells, longest.first_cell,
        )  # fmt: skip
    else:
        index = program // sizes.tiles % sizes.jobs
        batch = (program // sizes.tiles // sizes.jobs).to(tl.int64)
        job = read_job(tables.jobs, index)
        tile = program % sizes.tiles
        along = (job.limit + SIZE - 1) // SIZE - 1 - tile // job.lanes
        lane = job.lanes - 1 - tile % job.lanes
        first = tl.where(along < 0, job.limit, along * SIZE)
        n = sizes.n
        none = program * 0
        queries, keys, offset = none, none, none
    start = lane * job.lane_stride
    length = tl.minimum(job.limit, (n - 1 - start) // job.index_stride + 1)
    return job, Tile(batch, index, lane, start, first, length, queries, keys, n, offset)


@triton.jit
def query_rows(job, tile, SIZE: tl.constexpr, VARIED: tl.constexpr):
    """The rows of a tile of SIZE queries."""
    row = tile.first + tl.arange(0, SIZE)
    valid = row < tile.length
    if VARIED:
        valid = valid & (tile.start + row * job.index_stride >= tile.offset)
    return Rows(tile.start, row * job.index_stride, valid)


@triton.jit
def row_of_query(batch, head, query, sizes):
    """The place of a head's query in tensors [batch, heads, queries]."""
    return (batch * sizes.heads + head) * sizes.n + query


@triton.jit
def head_of(matrix, batch, head):
    """The same matrix, with its data from this head on."""
    return Matrix(matrix.data + (batch * matrix.batch + head * matrix.head), matrix.batch, matrix.head, matrix.row)


@triton.jit
def document_of(matrix, batch, head, first):
    """The same matrix, with its data from this head's row `first` on."""
    whole = head_of(matrix, batch, head)
    return Matrix(whole.data + first.to(tl.int64) * whole.row, whole.batch, whole.head, whole.row)


@triton.jit
def cell_position(index, cells, block, first_cell):
    """The position of a summary cell; cells are counted from the start of the sequence."""
    return index // cells * block + first_cell + index % cells


@triton.jit
def is_summary_cell(offset, cells, first_cell):
    """Whether the position at this offset in its block is one of the block's summary cells."""
    return (offset >= first_cell) & (offset < first_cell + cells)


@triton.jit
def cell_tile(start, offset, job, EVEN: tl.constexpr):
    """The positions of the summary cells start + offset: one number for the whole tile, and what each cell adds to it.

    EVEN: `cells` divides every start. What each cell adds is then the same for all tiles, and computed once.
    """
    base = start * 0
    if EVEN:
        base = start // job.cells * job.block
    else:
        offset = start + offset
    return base, cell_position(offset, job.cells, job.block, job.first_cell)


@triton.jit
def window_sees(row, key, job, BY_BLOCK: tl.constexpr):
    """Which pairs of a lane count; row and key are indices in the lane that broadcast."""
    distance = row - key
    seen = (distance >= job.near) & (distance <= job.far)
    if BY_BLOCK:
        in_own_block = (row // job.block == key // job.block) & (job.own != 0)
        seen = seen & (in_own_block | is_summary_cell(key % job.block, job.cells, job.first_cell))
    return seen


@triton.jit
def without_keys(lse):
    """The lse for backward: inf instead of -inf, so that a row without keys, or with scores of -inf alone, weighs 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def excluded(query, key, exclusions, index, COUNT: tl.constexpr):
    """Which pairs belong to an earlier leaf of the union; query and key are positions in the sequence that broadcast."""
    distance = query - key
    found = distance != distance  # none yet, in the shape of the pairs
    for number in tl.static_range(COUNT):
        row = exclusions + (index * COUNT + number) * EXCLUSION_FIELDS
        step, reach, block = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        period, first_cell, cells = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        seen = (distance % step == 0) & (distance <= reach) & (query // block == key // block)
        found = found | (seen & is_summary_cell(key % period, cells, first_cell))
    return found


@triton.jit
def row_addresses(matrix, rows, ROW: tl.constexpr):
    """Addresses [rows, width] in a head."""
    column = tl.arange(0, ROW.width)
    offset = rows.offset
    if ROW.wide:
        offset = offset.to(tl.int64)
    return (matrix.data + rows.start.to(tl.int64) * matrix.row) + (offset[:, None] * matrix.row + column[None, :])


@triton.jit
def load(matrix, rows, ROW: tl.constexpr, MASKED: tl.constexpr = True):
    """Rows of a head, [rows, width], and 0 where there is nothing. MASKED: some rows may not be there."""
    address = row_addresses(matrix, rows, ROW)
    inside = (tl.arange(0, ROW.width) < ROW.d)[None, :]
    if MASKED:
        valid = rows.valid[:, None]
        return tl.load(address, mask=valid & inside if ROW.d < ROW.width else valid, other=0.0)
    elif ROW.d < ROW.width:
        return tl.load(address, mask=inside, other=0.0)
    else:
        return tl.load(address)


@triton.jit
def store(values, matrix, rows, ROW: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Writes rows of a head. ACCUMULATE: adds to what is there."""
    if ACCUMULATE:
        values += load(matrix, rows, ROW).to(tl.float32)
    mask = rows.valid[:, None]
    if ROW.d < ROW.width:
        mask = mask & (tl.arange(0, ROW.width) < ROW.d)[None, :]
    tl.store(row_addresses(matrix, rows, ROW), values.to(matrix.data.dtype.element_ty), mask=mask)
