"""The loop over the keys of a tile of queries, which forward and backward_dq share.

First come the summary cells of earlier lanes, then the window in the queries' own lane. A kernel gives the function that
adds the keys [first, end) to its sums, tile by tile; keys from `last` on are not there:

    ADD(sums, queries, every, first, end, last, scale, DIMS, TILES, CELLS, MASKED) -> sums
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.attention.kernels.primitives import Rows, cell_tile, document_of, excluded, window_sees


class Keys(NamedTuple):
    """All keys of a head, and the tile of queries that sees some of them."""

    k: Any
    v: Any
    job: Any
    tile: Any
    exclusions: Any


@triton.jit
def every_key(k, v, job, tile, tables, TILES: tl.constexpr):
    """All keys that a tile of queries may see."""
    head = job.head // TILES.group
    keys = document_of(k, tile.batch, head, tile.keys)
    values = document_of(v, tile.batch, head, tile.keys)
    return Keys(keys, values, job, tile, tables.exclusions)


@triton.jit
def place_keys(every, start, last, TILES: tl.constexpr, CELLS: tl.constexpr):
    """The tile of keys from `start` on: their indices in the lane or among the summary cells, and their rows.

    Those from `last` on are not there. CELLS: they are summary cells.
    """
    offset = tl.arange(0, TILES.columns)
    key = start + offset
    if CELLS:
        base, place = cell_tile(start, offset, every.job, TILES.even)
    else:
        base = every.tile.start + start * every.job.index_stride
        place = offset * every.job.index_stride
    return key, Rows(base, place, key < last)


@triton.jit
def sees(every, key, rows, TILES: tl.constexpr, CELLS: tl.constexpr):
    """Which pairs of the queries and a tile of keys count."""
    job, tile = every.job, every.tile
    row = tile.first + tl.arange(0, TILES.rows)
    if CELLS:
        seen = rows.valid[None, :]
        position = rows.start + rows.offset
    else:
        seen = window_sees(row[:, None], key[None, :], job, TILES.by_block) & rows.valid[None, :]
        position = tile.start + key * job.index_stride
    if TILES.exclude > 0:
        query = tile.start + row * job.index_stride
        seen = seen & ~excluded(query[:, None], position[None, :], every.exclusions, tile.index, TILES.exclude)
    return seen


@triton.jit
def over_keys(sums, queries, every, scale, DIMS: tl.constexpr, TILES: tl.constexpr, ADD: tl.constexpr):
    job, tile = every.job, every.tile
    if TILES.summary:
        before = tile.lane * (job.lane_stride // job.block) * job.cells
        whole = before // TILES.columns * TILES.columns
        if TILES.exclude > 0:
            whole = 0
        else:
            sums = ADD(sums, queries, every, 0, whole, before, scale, DIMS, TILES, True, False)
        sums = ADD(sums, queries, every, whole, before, before, scale, DIMS, TILES, True, True)

    # The keys are [first, end). Where there are few tiles, one loop that loads ahead is faster than three that do not.
    first = tl.maximum(0, tile.first - job.far)
    end = tl.minimum(tile.length, tile.first + TILES.rows - job.near)
    if TILES.short:
        sums = ADD(sums, queries, every, first, end, end, scale, DIMS, TILES, False, True)
    else:
        # All rows see all of a tile of keys that starts in [inner, outer): it needs no mask.
        inner = first + tl.cdiv(tl.maximum(0, tile.first + TILES.rows - 1 - job.far - first), TILES.columns) * TILES.columns
        outer = inner + tl.maximum(0, tile.first - job.near + 1 - inner) // TILES.columns * TILES.columns
        if (job.own == 0) | (job.block < job.limit):
            outer = inner
        sums = ADD(sums, queries, every, first, tl.minimum(inner, end), end, scale, DIMS, TILES, False, True)
        sums = ADD(sums, queries, every, inner, outer, end, scale, DIMS, TILES, False, False)
        sums = ADD(sums, queries, every, outer, end, end, scale, DIMS, TILES, False, True)
    return sums
