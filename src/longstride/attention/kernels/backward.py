"""The gradients: backward_dq and backward_dkv, from weights that are computed again, with what they need before and after.

With the score s = scale * q k^T and the weight w = exp(s) / sum(exp(s)) of a pair, and the output's gradient do:

    dv = sum over queries of w * do            ds = w * (do v^T - delta),  where delta = sum over values of do * output
    dq = scale * sum over keys of ds * k       dk = scale * sum over queries of ds * q

w comes from q, k and the query's lse (log-sum-exp); so nothing is stored for a pair. backward_dq owns a tile of queries and
backward_dkv one of keys: each gradient is summed by one program in one order, and comes out the same every time.
`scale` is softmax_scale * log2(e), for scores in base 2.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.attention.kernels.arguments import Matrix
from longstride.attention.kernels.key_loop import Keys, over_keys, place_keys, sees
from longstride.attention.kernels.primitives import (
    Tile,
    cell_position,
    cell_tile,
    excluded,
    head_of,
    load_rows,
    read_tile,
    store_rows,
    window_sees,
    without_keys,
)


@triton.jit
def delta_of_rows(d_output, output, sizes, ROW: tl.constexpr, ROWS: tl.constexpr):
    """delta for a program's queries; with it their head's number, and which are there."""
    program = tl.program_id(0)
    head = (program // sizes.tiles % sizes.heads).to(tl.int64)
    batch = (program // sizes.tiles // sizes.heads).to(tl.int64)
    row = program % sizes.tiles * ROWS + tl.arange(0, ROWS)
    valid = row < sizes.n
    every_d_output, every_output = head_of(d_output, batch, head), head_of(output, batch, head)
    d_outputs = load_rows(every_d_output, program * 0, row, valid, ROW, True)
    outputs = load_rows(every_output, program * 0, row, valid, ROW, True)
    return tl.sum(d_outputs.to(tl.float32) * outputs.to(tl.float32), 1), batch * sizes.heads + head, row, valid


@triton.jit
def backward_delta(d_output, output, delta, sizes, ROW: tl.constexpr, ROWS: tl.constexpr):
    """delta = sum over values of do * output, for every query."""
    total, number, row, valid = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    tl.store(delta + number * sizes.n + row, total, mask=valid)


@triton.jit
def backward_row_stats(
    d_output, output, lse, row_stats, sizes, padded, step, along, ROW: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """lse and delta of every query, as one row each, for the kernels of Hopper. A query without keys gets the lse inf.

    Lane by lane: the stats of a residue class modulo the step lie side by side, `along` of them.
    """
    delta, head, row, valid = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    total = tl.load(lse + head * sizes.n + row, mask=valid, other=0.0)
    row_stats += head * 2 * padded + row % step * along + row // step
    tl.store(row_stats, without_keys(total), mask=valid)
    tl.store(row_stats + padded, delta, mask=valid)


@triton.jit
def backward_sum_parts(
    parts, gradient, first_cells, job, sizes, splits, ROW: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Adds the parts of the summary cells' dk or dv to what is there, in order, for the kernels of Hopper.

    parts: float32 [batch, heads, cells, splits * d]; first_cells: of a block, int32 [heads].
    """
    program = tl.program_id(0)
    head = (program // sizes.tiles % sizes.heads).to(tl.int64)
    batch = (program // sizes.tiles // sizes.heads).to(tl.int64)
    cell = program % sizes.tiles * ROWS + tl.arange(0, ROWS)
    valid = cell < sizes.n
    own = head_of(parts, batch, head)
    total = tl.zeros([ROWS, ROW.width], tl.float32)
    for split in range(splits):
        part = Matrix(own.data + split * ROW.d, own.batch, own.head, own.row)
        total += load_rows(part, program * 0, cell, valid, ROW, True)
    position = cell_position(cell, job.cells, job.block, tl.load(first_cells + head))
    every = head_of(gradient, batch, head)
    total += load_rows(every, program * 0, position, valid, ROW, True).to(tl.float32)
    store_rows(total, every, program * 0, position, valid, ROW)


class Queries(NamedTuple):
    """Queries with all that their gradients follow from: those of a tile, or (as matrices and pointers) of a head."""

    q: Any
    d_output: Any
    lse: Any
    delta: Any


@triton.jit
def add_dq(
    dq, queries, every, start, last, scale,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq after a tile of keys."""
    at = place_keys(every, start, last, TILES, CELLS)
    keys = load_rows(every.k, at.base, at.place, at.valid, DIMS.qk, MASKED)
    values = load_rows(every.v, at.base, at.place, at.valid, DIMS.v, MASKED)
    if MASKED:
        seen = sees(every, at, TILES, CELLS)
    scores = tl.dot(queries.q, tl.trans(keys), input_precision=DIMS.precision)
    weights = tl.exp2(scores * scale - queries.lse[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    d_weights = tl.dot(queries.d_output, tl.trans(values), input_precision=DIMS.precision)
    d_scores = weights * (d_weights - queries.delta[:, None])
    return tl.dot(d_scores.to(keys.dtype), keys, dq, input_precision=DIMS.precision, out_dtype=tl.float32)


@triton.jit
def backward_dq(
    q, k, v, d_output, lse, delta, dq, tables, scale, softmax_scale, sizes,
    DIMS: tl.constexpr, TILES: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The tiles are those of forward. ACCUMULATE: adds to the dq of an earlier pass."""
    job, tile = read_tile(tables, sizes, TILES.rows)
    if tile.first < tile.length:
        every_query = head_of(q, tile.batch, job.head)
        every = Keys(head_of(k, tile.batch, job.head), head_of(v, tile.batch, job.head), job, tile, tables.exclusions)
        every_d_output = head_of(d_output, tile.batch, job.head)
        every_dq = head_of(dq, tile.batch, job.head)
        before = (tile.batch * sizes.heads + job.head) * sizes.n
        every_lse, every_delta = lse + before, delta + before

        row = tile.first + tl.arange(0, TILES.rows)
        valid = row < tile.length
        place = row * job.index_stride
        position = tile.start + place
        queries = Queries(
            load_rows(every_query, tile.start, place, valid, DIMS.qk, True),
            load_rows(every_d_output, tile.start, place, valid, DIMS.v, True),
            without_keys(tl.load(every_lse + position, mask=valid, other=float("inf"))),
            tl.load(every_delta + position, mask=valid, other=0.0),
        )
        total = tl.zeros([TILES.rows, DIMS.qk.width], tl.float32)
        total = over_keys(total, queries, every, scale, DIMS, TILES, add_dq) * softmax_scale
        if ACCUMULATE:
            total += load_rows(every_dq, tile.start, place, valid, DIMS.qk, True).to(tl.float32)
        store_rows(total, every_dq, tile.start, place, valid, DIMS.qk)


class OwnKeys(NamedTuple):
    """A program's tile of keys."""

    k: Any
    v: Any
    key: Any
    """In the lane, or among the summary cells."""
    position: Any
    seen_from: Any
    """Of summary cells: the first query that sees them."""


@triton.jit
def add_dkv(
    dk, dv, own, every, job, tile, exclusions, first, end, scale,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The queries [first, end) of a lane, in tiles. Pairs lie keys down and queries across: both sums want them so."""
    offset = tl.arange(0, TILES.rows)
    place = offset * job.index_stride
    for start in tl.range(first, end, TILES.rows):
        row = start + offset
        valid = row < tile.length
        base = tile.start + start * job.index_stride
        position = base + place
        query = load_rows(every.q, base, place, valid, DIMS.qk, True)
        # A row that is not there has weight 0: 2 ** (0 - inf).
        lse = without_keys(tl.load(every.lse + position, mask=valid, other=float("inf")))
        scores = tl.dot(own.k, tl.trans(query), input_precision=DIMS.precision)
        weights = tl.exp2(scores * scale - lse[None, :])
        if MASKED:
            if CELLS:
                seen = row[None, :] >= own.seen_from[:, None]
            else:
                seen = window_sees(row[None, :], own.key[:, None], job, TILES.grouped)
            seen = seen & valid[None, :]
            if TILES.exclude > 0:
                seen = seen & ~excluded(position[None, :], own.position[:, None], exclusions, tile.index, TILES.exclude)
            weights = tl.where(seen, weights, 0.0)
        d_output = load_rows(every.d_output, base, place, valid, DIMS.v, True)
        dv = tl.dot(weights.to(d_output.dtype), d_output, dv, input_precision=DIMS.precision, out_dtype=tl.float32)
        d_weights = tl.dot(own.v, tl.trans(d_output), input_precision=DIMS.precision)
        delta = tl.load(every.delta + position, mask=valid, other=0.0)
        d_scores = weights * (d_weights - delta[None, :])
        dk = tl.dot(d_scores.to(query.dtype), query, dk, input_precision=DIMS.precision, out_dtype=tl.float32)
    return dk, dv


@triton.jit
def backward_dkv(
    q, k, v, d_output, lse, delta, dk, dv, tables, scale, softmax_scale, sizes,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """CELLS: the keys are summary cells and the queries those of all later lanes; or else both are in one lane's window."""
    job, tile = read_tile(tables, sizes, TILES.columns)
    offset = tl.arange(0, TILES.columns)
    in_lane = job.lane_stride // job.block * job.cells
    key_count = tile.length
    if CELLS:
        tile = Tile(tile.batch, tile.index, 0, 0, tl.program_id(0) % sizes.tiles * TILES.columns, sizes.n)
        key_count = (job.lanes - 1) * in_lane
    if tile.first < key_count:
        every_query = head_of(q, tile.batch, job.head)
        every_key = head_of(k, tile.batch, job.head)
        every_value = head_of(v, tile.batch, job.head)
        every_d_output = head_of(d_output, tile.batch, job.head)
        every_dk, every_dv = head_of(dk, tile.batch, job.head), head_of(dv, tile.batch, job.head)
        before = (tile.batch * sizes.heads + job.head) * sizes.n
        every = Queries(every_query, every_d_output, lse + before, delta + before)

        key = tile.first + offset
        valid = key < key_count
        # The queries are [first, end).
        if CELLS:
            base, place = cell_tile(tile.first, offset, job, TILES.even)
            seen_from = (key // in_lane + 1) * job.lane_stride
            first = (tile.first // in_lane + 1) * job.lane_stride
            end = sizes.n
        else:
            base = tile.start + tile.first * job.index_stride
            place = offset * job.index_stride
            seen_from = key
            first = tile.first + job.near
            end = tl.minimum(tile.length, tile.first + TILES.columns + job.far)
        keys = load_rows(every_key, base, place, valid, DIMS.qk, True)
        values = load_rows(every_value, base, place, valid, DIMS.v, True)
        own = OwnKeys(keys, values, key, base + place, seen_from)
        dk_sum = tl.zeros([TILES.columns, DIMS.qk.width], tl.float32)
        dv_sum = tl.zeros([TILES.columns, DIMS.v.width], tl.float32)

        if TILES.short:
            dk_sum, dv_sum = add_dkv(
                dk_sum, dv_sum, own, every, job, tile, tables.exclusions, first, end, scale, DIMS, TILES, CELLS, True
            )  # fmt: skip
        else:
            # All of a tile of queries that starts in [inner, outer) see all keys: it needs no mask.
            bound = tl.maximum(first, end)
            if CELLS:
                last_key = tl.minimum(tile.first + TILES.columns, key_count) - 1
                inner = first + tl.cdiv((last_key // in_lane + 1) * job.lane_stride - first, TILES.rows) * TILES.rows
                outer = bound
            else:
                inner = first + tl.cdiv(TILES.columns - 1, TILES.rows) * TILES.rows
                outer = tl.minimum(tile.first + job.far + 1, tile.length)
                outer = inner + tl.maximum(0, outer - inner) // TILES.rows * TILES.rows
                if (job.own == 0) | (job.block < job.limit):
                    inner = bound
            inner = tl.minimum(inner, bound)
            outer = tl.maximum(inner, tl.minimum(outer, bound))
            dk_sum, dv_sum = add_dkv(
                dk_sum, dv_sum, own, every, job, tile, tables.exclusions, first, inner, scale, DIMS, TILES, CELLS, True
            )  # fmt: skip
            dk_sum, dv_sum = add_dkv(
                dk_sum, dv_sum, own, every, job, tile, tables.exclusions, inner, outer, scale, DIMS, TILES, CELLS, False
            )  # fmt: skip
            if not CELLS:
                dk_sum, dv_sum = add_dkv(
                    dk_sum, dv_sum, own, every, job, tile, tables.exclusions, outer, end, scale, DIMS, TILES, CELLS, True
                )  # fmt: skip

        dk_sum *= softmax_scale
        if ACCUMULATE:
            dk_sum += load_rows(every_dk, base, place, valid, DIMS.qk, True).to(tl.float32)
            dv_sum += load_rows(every_dv, base, place, valid, DIMS.v, True).to(tl.float32)
        store_rows(dk_sum, every_dk, base, place, valid, DIMS.qk)
        store_rows(dv_sum, every_dv, base, place, valid, DIMS.v)
