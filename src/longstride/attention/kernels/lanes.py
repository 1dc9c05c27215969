"""lane_forward, lane_backward: for lanes so short that a tile holds one whole, or several.

Nothing is read twice, forward or backward: a program takes one tile after the other, and loads the next while it computes
this one. Backward computes dq, dk and dv in one kernel. Short lanes are interleaved in a tile, so that neighbours in memory
are read together: row r of a tile is index r // together of its lane r % together.

With documents, a tile holds lanes of one of them: the shorter the document, the more.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.attention.kernels.arguments import Matrix
from longstride.attention.kernels.primitives import (
    LANE_WORK_FIELDS,
    PRECISION,
    Rows,
    document_of,
    excluded,
    load,
    read_job,
    row_of_query,
    store,
    window_sees,
    without_keys,
)


class LaneItem(NamedTuple):
    """An item, which is one tile of lanes: the job's index, and the head."""

    index: Any
    batch: Any
    head: Any
    document: Any
    """Row of the document's first position; 0 without documents."""
    together: Any
    """Whole lanes of the tile."""


@triton.jit
def read_lanes(item, shared_job, tables, sizes, TILES: tl.constexpr):
    """The job of an item, the item, and the rows of its lanes, which count from the start of a document.

    With documents, the item is a row of `work.LaneWork`, and the job that of the longest document: n ends the rows.
    """
    if TILES.varied:
        work = tables.work + item % sizes.tiles * LANE_WORK_FIELDS
        index, batch, document = tl.load(work), tl.load(work + 1), tl.load(work + 2)
        n, first, together = tl.load(work + 3), tl.load(work + 4), tl.load(work + 5)
        batch = (item // sizes.tiles + batch).to(tl.int64)
    else:
        index = item // sizes.tiles % sizes.jobs
        batch = (item // sizes.tiles // sizes.jobs).to(tl.int64)
        document = item * 0
        n = sizes.n
        first = item % sizes.tiles * TILES.together
        together = TILES.together
    if TILES.shared:
        job = shared_job
        head = index.to(tl.int64)
    else:
        job = read_job(tables.jobs, index)
        head = job.head
    row = tl.arange(0, TILES.rows)
    lane = row % together
    start = first * job.lane_stride
    offset = lane * job.lane_stride + row // together * job.index_stride
    valid = (first + lane < job.lanes) & (row // together < job.limit) & (start + offset < n)
    return job, LaneItem(index, batch, head, document, together), Rows(start, offset, valid)


@triton.jit
def lanes_of(matrix, lanes):
    """The same matrix, with its data from the item's head, and the first row of its document, on."""
    return document_of(matrix, lanes.batch, lanes.head, lanes.document)


@triton.jit
def rows_as(matrix, other, SAME: tl.constexpr):
    """The matrix, with the stride of the other one if they have the SAME."""
    return Matrix(matrix.data, matrix.batch, matrix.head, other.row if SAME else matrix.row)


@triton.jit
def lanes_see(row, key, job, lanes, query_position, key_position, exclusions, TILES: tl.constexpr):
    """Which pairs of a tile count; all broadcast."""
    seen = window_sees(row // lanes.together, key // lanes.together, job, TILES.by_block)
    if TILES.varied or TILES.together > 1:
        seen = seen & (row % lanes.together == key % lanes.together)
    if TILES.exclude > 0:
        seen = seen & ~excluded(query_position, key_position, exclusions, lanes.index, TILES.exclude)
    return seen


@triton.jit
def lane_forward(
    q, k, v, output, lse, tables, scale, sizes, DIMS: tl.constexpr, TILES: tl.constexpr, ACCUMULATE: tl.constexpr
):  # fmt: skip
    k, v, output = rows_as(k, q, TILES.same), rows_as(v, q, TILES.same), rows_as(output, q, TILES.same)
    row = tl.arange(0, TILES.rows)
    # A load that waits for another cannot be made ahead, so a job that all heads share is read before the loop.
    shared_job = read_job(tables.jobs, 0)
    for item in tl.range(tl.program_id(0), sizes.total, tl.num_programs(0), num_stages=TILES.stages):
        job, lanes, rows = read_lanes(item, shared_job, tables, sizes, TILES)
        position = rows.start + rows.offset
        query = load(lanes_of(q, lanes), rows, DIMS.qk)
        keys = load(lanes_of(k, lanes), rows, DIMS.qk)
        values = load(lanes_of(v, lanes), rows, DIMS.v)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        seen = lanes_see(
            row[:, None], row[None, :], job, lanes, position[:, None], position[None, :], tables.exclusions, TILES
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))

        largest = tl.max(scores, 1) * scale
        lse_rows = lse + row_of_query(lanes.batch, lanes.head, lanes.document, sizes) + rows.start + rows.offset
        if ACCUMULATE:
            before = tl.load(lse_rows, mask=rows.valid, other=float("-inf"))
            largest = tl.maximum(largest, before)
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores * scale - finite[:, None])
        weight = tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        if ACCUMULATE:
            kept = tl.exp2(before - finite)
            weight += kept
            sums += kept[:, None] * load(lanes_of(output, lanes), rows, DIMS.v).to(tl.float32)
        nothing = weight == 0
        weight = tl.where(nothing, 1.0, weight)
        store(sums / weight[:, None], lanes_of(output, lanes), rows, DIMS.v, False)
        tl.store(lse_rows, tl.where(nothing, float("-inf"), largest + tl.log2(weight)), mask=rows.valid)


@triton.jit
def lane_backward(
    q, k, v, d_output, output, lse, gradients, tables, scales, sizes,
    DIMS: tl.constexpr, TILES: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The sums are those of backward.py. Pairs lie keys down and queries across."""
    k, v, d_output = rows_as(k, q, TILES.same), rows_as(v, q, TILES.same), rows_as(d_output, q, TILES.same)
    output, dq = rows_as(output, q, TILES.same), rows_as(gradients.dq, q, TILES.same)
    dk, dv = rows_as(gradients.dk, q, TILES.same), rows_as(gradients.dv, q, TILES.same)
    row = tl.arange(0, TILES.rows)
    # A load that waits for another cannot be made ahead, so a job that all heads share is read before the loop.
    shared_job = read_job(tables.jobs, 0)
    for item in tl.range(tl.program_id(0), sizes.total, tl.num_programs(0), num_stages=TILES.stages):
        job, lanes, rows = read_lanes(item, shared_job, tables, sizes, TILES)
        position = rows.start + rows.offset
        query = load(lanes_of(q, lanes), rows, DIMS.qk)
        keys = load(lanes_of(k, lanes), rows, DIMS.qk)
        values = load(lanes_of(v, lanes), rows, DIMS.v)
        d_outputs = load(lanes_of(d_output, lanes), rows, DIMS.v)
        outputs = load(lanes_of(output, lanes), rows, DIMS.v)
        lse_rows = lse + row_of_query(lanes.batch, lanes.head, lanes.document, sizes) + rows.start + rows.offset
        own_lse = without_keys(tl.load(lse_rows, mask=rows.valid, other=float("inf")))
        delta = tl.sum(d_outputs.to(tl.float32) * outputs.to(tl.float32), 1)

        scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION)
        seen = lanes_see(
            row[None, :], row[:, None], job, lanes, position[None, :], position[:, None], tables.exclusions, TILES
        )  # fmt: skip
        weights = tl.where(seen, tl.exp2(scores * scales.scores - own_lse[None, :]), 0.0)
        dv_sum = tl.dot(weights.to(d_outputs.dtype), d_outputs, input_precision=PRECISION)
        store(dv_sum, lanes_of(dv, lanes), rows, DIMS.v, ACCUMULATE)

        d_weights = tl.dot(values, tl.trans(d_outputs), input_precision=PRECISION)
        d_scores = (weights * (d_weights - delta[None, :])).to(query.dtype)
        dk_sum = tl.dot(d_scores, query, input_precision=PRECISION) * scales.gradients
        store(dk_sum, lanes_of(dk, lanes), rows, DIMS.qk, ACCUMULATE)
        dq_sum = tl.dot(tl.trans(d_scores), keys, input_precision=PRECISION) * scales.gradients
        store(dq_sum, lanes_of(dq, lanes), rows, DIMS.qk, ACCUMULATE)
