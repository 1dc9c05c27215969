"""The gradients: backward_dq and backward_dkv, from weights that are computed again, with what they need before and after.

With the score s = scale * q k^T and the weight w = exp(s) / sum(exp(s)) of a pair, and the output's gradient do:

    dv = sum over queries of w * do            ds = w * (do v^T - delta),  where delta = sum over values of do * output
    dq = scale * sum over keys of ds * k       dk = scale * sum over queries of ds * q

w is also the derivative of the query's lse by s. So if the lse is a result, too, with the gradient dlse, delta is reduced by
dlse.

w comes from q, k and the query's lse (log-sum-exp); so nothing is stored for a pair. backward_dq owns a tile of queries and
backward_dkv one of keys: each gradient is summed by one program in one order, and comes out the same every time.
Scores are in base 2: their scale includes log2(e).
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.attention.kernels.arguments import Matrix
from longstride.attention.kernels.key_loop import every_key, over_keys, place_keys, sees
from longstride.attention.kernels.primitives import (
    PRECISION,
    Rows,
    Tile,
    cell_position,
    cell_tile,
    document_of,
    excluded,
    head_of,
    load,
    query_rows,
    read_tile,
    row_of_query,
    store,
    window_sees,
    without_keys,
)


class Queries(NamedTuple):
    """Queries with all that their gradients follow from: all (as matrices and pointers), or those of a head or a tile."""

    q: Any
    d_output: Any
    lse: Any
    delta: Any


@triton.jit
def read_rows(sizes, ROWS: tl.constexpr):
    """Batch and head of a program, and its ROWS rows there, with `sizes` of `row_sizes`."""
    program = tl.program_id(0)
    head = (program // sizes.tiles % sizes.heads).to(tl.int64)
    batch = (program // sizes.tiles // sizes.heads).to(tl.int64)
    row = program % sizes.tiles * ROWS + tl.arange(0, ROWS)
    return batch, head, Rows(program * 0, row, row < sizes.n)


@triton.jit
def delta_of_rows(d_output, output, sizes, ROW: tl.constexpr, ROWS: tl.constexpr):
    """delta of a program's queries, their head's number in the batch, and their rows."""
    batch, head, rows = read_rows(sizes, ROWS)
    every_d_output, every_output = head_of(d_output, batch, head), head_of(output, batch, head)
    d_outputs, outputs = load(every_d_output, rows, ROW), load(every_output, rows, ROW)
    return tl.sum(d_outputs.to(tl.float32) * outputs.to(tl.float32), 1), batch * sizes.heads + head, rows


@triton.jit
def backward_delta(d_output, output, d_lse, delta, sizes, ROW: tl.constexpr, ROWS: tl.constexpr):
    """delta = sum over values of do * output, for every query, minus the gradient of its lse, if that has one."""
    total, head, rows = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    if d_lse is not None:
        total -= tl.load(d_lse + head * sizes.n + rows.offset, mask=rows.valid, other=0.0)
    tl.store(delta + head * sizes.n + rows.offset, total, mask=rows.valid)


@triton.jit
def backward_row_stats(d_output, output, lse, row_stats, sizes, padded, step, along, ROW: tl.constexpr, ROWS: tl.constexpr):
    """lse and delta of every query, as one row each, for the kernels of Hopper. A query without keys gets the lse inf.

    Lane by lane: the stats of a residue class modulo the step lie side by side, `along` of them.
    """
    delta, head, rows = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    total = tl.load(lse + head * sizes.n + rows.offset, mask=rows.valid, other=0.0)
    row_stats += head * 2 * padded + rows.offset % step * along + rows.offset // step
    tl.store(row_stats, without_keys(total), mask=rows.valid)
    tl.store(row_stats + padded, delta, mask=rows.valid)


@triton.jit
def backward_sum_parts(parts, gradient, first_cells, job, sizes, splits, ROW: tl.constexpr, ROWS: tl.constexpr):
    """Adds the parts of the summary cells' dk or dv to what is there, in order, for the kernels of Hopper.

    parts: float32 [batch, heads, cells, splits * d]; first_cells: of a block, int32 [heads].
    """
    batch, head, cells = read_rows(sizes, ROWS)
    own = head_of(parts, batch, head)
    total = tl.zeros([ROWS, ROW.width], tl.float32)
    for split in range(splits):
        total += load(Matrix(own.data + split * ROW.d, own.batch, own.head, own.row), cells, ROW)
    position = cell_position(cells.offset, job.cells, job.block, tl.load(first_cells + head))
    store(total, head_of(gradient, batch, head), Rows(cells.start, position, cells.valid), ROW, True)


@triton.jit
def add_dq(
    dq, queries, every, first, end, last, scale,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq after some tiles of keys."""
    for start in tl.range(first, end, TILES.columns):
        key, rows = place_keys(every, start, last, TILES, CELLS)
        keys = load(every.k, rows, DIMS.qk, MASKED)
        values = load(every.v, rows, DIMS.v, MASKED)
        if MASKED:
            seen = sees(every, key, rows, TILES, CELLS)
        scores = tl.dot(queries.q, tl.trans(keys), input_precision=PRECISION)
        weights = tl.exp2(scores * scale - queries.lse[:, None])
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(queries.d_output, tl.trans(values), input_precision=PRECISION)
        d_scores = weights * (d_weights - queries.delta[:, None])
        dq = tl.dot(d_scores.to(keys.dtype), keys, dq, input_precision=PRECISION, out_dtype=tl.float32)
    return dq


@triton.jit
def backward_dq(queries, k, v, dq, tables, scales, sizes, DIMS: tl.constexpr, TILES: tl.constexpr, ACCUMULATE: tl.constexpr):
    """The tiles are those of forward. ACCUMULATE: adds to the dq of an earlier pass."""
    job, tile = read_tile(tables, sizes, TILES.rows, TILES.varied)
    if tile.first < tile.length:
        every_query = document_of(queries.q, tile.batch, job.head, tile.queries)
        every = every_key(k, v, job, tile, tables, TILES)
        every_d_output = document_of(queries.d_output, tile.batch, job.head, tile.queries)
        every_dq = document_of(dq, tile.batch, job.head, tile.queries)
        before = row_of_query(tile.batch, job.head, tile.queries, sizes)
        rows = query_rows(job, tile, TILES.rows, TILES.varied)
        position = rows.start + rows.offset
        own = Queries(
            load(every_query, rows, DIMS.qk),
            load(every_d_output, rows, DIMS.v),
            without_keys(tl.load(queries.lse + before + position, mask=rows.valid, other=float("inf"))),
            tl.load(queries.delta + before + position, mask=rows.valid, other=0.0),
        )
        total = tl.zeros([TILES.rows, DIMS.qk.width], tl.float32)
        total = over_keys(total, own, every, scales.scores, DIMS, TILES, add_dq) * scales.gradients
        store(total, every_dq, rows, DIMS.qk, ACCUMULATE)


class OwnKeys(NamedTuple):
    """A program's tile of keys, and where it lies."""

    k: Any
    v: Any
    key: Any
    """In the lane, or among the summary cells."""
    position: Any
    seen_from: Any
    """Of summary cells: the first query that sees them."""
    job: Any
    tile: Any
    exclusions: Any


@triton.jit
def add_dkv(
    dk, dv, own, every, first, end, scale,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The queries [first, end) of a lane, in tiles. Pairs lie keys down and queries across: both sums want them so."""
    job, tile = own.job, own.tile
    offset = tl.arange(0, TILES.rows)
    for start in tl.range(first, end, TILES.rows):
        row = start + offset
        valid = row < tile.length
        rows = Rows(tile.start + start * job.index_stride, offset * job.index_stride, valid)
        position = rows.start + rows.offset
        query = load(every.q, rows, DIMS.qk)
        # A row that is not there has weight 0: 2 ** (0 - inf).
        lse = without_keys(tl.load(every.lse + position, mask=valid, other=float("inf")))
        scores = tl.dot(own.k, tl.trans(query), input_precision=PRECISION)
        weights = tl.exp2(scores * scale - lse[None, :])
        if MASKED:
            if CELLS:
                seen = row[None, :] >= own.seen_from[:, None]
            else:
                seen = window_sees(row[None, :], own.key[:, None], job, TILES.by_block)
            seen = seen & valid[None, :]
            if TILES.exclude > 0:
                seen &= ~excluded(position[None, :], own.position[:, None], own.exclusions, tile.index, TILES.exclude)
            weights = tl.where(seen, weights, 0.0)
        d_output = load(every.d_output, rows, DIMS.v)
        dv = tl.dot(weights.to(d_output.dtype), d_output, dv, input_precision=PRECISION, out_dtype=tl.float32)
        d_weights = tl.dot(own.v, tl.trans(d_output), input_precision=PRECISION)
        delta = tl.load(every.delta + position, mask=valid, other=0.0)
        d_scores = weights * (d_weights - delta[None, :])
        dk = tl.dot(d_scores.to(query.dtype), query, dk, input_precision=PRECISION, out_dtype=tl.float32)
    return dk, dv


@triton.jit
def backward_dkv(
    queries, k, v, dk, dv, tables, scales, sizes,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """CELLS: the keys are summary cells and the queries those of all later lanes; or else both are in one lane's window."""
    job, tile = read_tile(tables, sizes, TILES.columns, TILES.varied)
    offset = tl.arange(0, TILES.columns)
    in_lane = job.lane_stride // job.block * job.cells
    key_count = tile.length
    if CELLS:
        first_key = tile.first if TILES.varied else tl.program_id(0) % sizes.tiles * TILES.columns
        tile = Tile(tile.batch, tile.index, 0, 0, first_key, tile.n, tile.queries, tile.keys, tile.n, tile.offset)
        key_count = (job.lanes - 1) * in_lane
    if tile.first < key_count:
        every_query = document_of(queries.q, tile.batch, job.head, tile.queries)
        every_d_output = document_of(queries.d_output, tile.batch, job.head, tile.queries)
        head = job.head // TILES.group
        every_k, every_v = document_of(k, tile.batch, head, tile.keys), document_of(v, tile.batch, head, tile.keys)
        every_dk, every_dv = document_of(dk, tile.batch, head, tile.keys), document_of(dv, tile.batch, head, tile.keys)
        before = row_of_query(tile.batch, job.head, tile.queries, sizes)
        every = Queries(every_query, every_d_output, queries.lse + before, queries.delta + before)

        key = tile.first + offset
        # The queries are [first, end).
        if CELLS:
            base, place = cell_tile(tile.first, offset, job, TILES.even)
            seen_from = (key // in_lane + 1) * job.lane_stride
            first = (tile.first // in_lane + 1) * job.lane_stride
            end = tile.n
        else:
            base = tile.start + tile.first * job.index_stride
            place = offset * job.index_stride
            seen_from = key
            first = tile.first + job.near
            end = tl.minimum(tile.length, tile.first + TILES.columns + job.far)
        if TILES.varied:
            first = tl.maximum(first, tl.cdiv(tl.maximum(0, tile.offset - tile.start), job.index_stride))
        rows = Rows(base, place, key < key_count)
        keys, values = load(every_k, rows, DIMS.qk), load(every_v, rows, DIMS.v)
        own = OwnKeys(keys, values, key, base + place, seen_from, job, tile, tables.exclusions)
        dk_sum = tl.zeros([TILES.columns, DIMS.qk.width], tl.float32)
        dv_sum = tl.zeros([TILES.columns, DIMS.v.width], tl.float32)

        if TILES.short:
            dk_sum, dv_sum = add_dkv(dk_sum, dv_sum, own, every, first, end, scales.scores, DIMS, TILES, CELLS, True)
        else:
            # All of a tile of queries that starts in [inner, outer) see all keys: it needs no mask.
            bound = tl.maximum(first, end)
            if CELLS:
                last_key = tl.minimum(tile.first + TILES.columns, key_count) - 1
                distance = (last_key // in_lane + 1) * job.lane_stride - first
                if TILES.varied:
                    distance = tl.maximum(0, distance)
                inner = first + tl.cdiv(distance, TILES.rows) * TILES.rows
                outer = bound
            else:
                inner = first + tl.cdiv(TILES.columns - 1, TILES.rows) * TILES.rows
                outer = tl.minimum(tile.first + job.far + 1, tile.length)
                outer = inner + tl.maximum(0, outer - inner) // TILES.rows * TILES.rows
                if (job.own == 0) | (job.block < job.limit):
                    inner = bound
            inner = tl.minimum(inner, bound)
            outer = tl.maximum(inner, tl.minimum(outer, bound))
            dk_sum, dv_sum = add_dkv(dk_sum, dv_sum, own, every, first, inner, scales.scores, DIMS, TILES, CELLS, True)
            dk_sum, dv_sum = add_dkv(dk_sum, dv_sum, own, every, inner, outer, scales.scores, DIMS, TILES, CELLS, False)
            if not CELLS:
                dk_sum, dv_sum = add_dkv(dk_sum, dv_sum, own, every, outer, end, scales.scores, DIMS, TILES, CELLS, True)

        store(dk_sum * scales.gradients, every_dk, rows, DIMS.qk, ACCUMULATE)
        store(dv_sum, every_dv, rows, DIMS.v, ACCUMULATE)
