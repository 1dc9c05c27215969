"""lane_forward, lane_backward: for lanes so short that a tile holds one whole, or several.

Then nothing is read twice, in either direction: a program takes one tile after the other, and loads the next while it
computes this one. Backward has all it needs in one place, too, and makes dq, dk and dv in one go. Short lanes lie side by
side in a tile, index by index, so that what is next to each other in memory is read together: row r of a tile is index
r // TOGETHER of its lane r % TOGETHER.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.primitives import (
    excluded,
    load_rows,
    read_job,
    store_rows,
    window_sees,
    without_keys,
)


@triton.jit
def lane_forward(
    q, k, v, output, log_sum_exp, jobs, exclusions,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, output_batch, output_head, output_row,
    heads, n, job_count, tiles, total, scale,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, SHARED: tl.constexpr, SAME: tl.constexpr, GROUPED: tl.constexpr,
    EXCLUDE: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    place = row // TOGETHER
    if SAME:  # One set of offsets then serves all tensors.
        k_row = q_row
        v_row = q_row
        output_row = q_row
    # A load that waits for another cannot be made ahead, so a job that all heads share is read before the loop.
    head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, 0)
    for program in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        index = program // tiles % job_count
        batch = (program // tiles // job_count).to(tl.int64)
        if SHARED:
            head = index.to(tl.int64)
        else:
            head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, index)
        first_lane = program % tiles * TOGETHER
        start = first_lane * lane_shift
        offset = row % TOGETHER * lane_shift + place * step
        valid = (first_lane + row % TOGETHER < lanes) & (place < limit) & (start + offset < n)

        query = load_rows(q + batch * q_batch + head * q_head, start, offset, q_row, valid, D_QK, WIDTH_QK, WIDE, True)
        keys = load_rows(k + batch * k_batch + head * k_head, start, offset, k_row, valid, D_QK, WIDTH_QK, WIDE, True)
        values = load_rows(v + batch * v_batch + head * v_head, start, offset, v_row, valid, D_V, WIDTH_V, WIDE, True)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        seen = window_sees(place[:, None], place[None, :], near, far, own, block, cells, first_cell, GROUPED)
        if TOGETHER > 1:
            seen = seen & (row[:, None] % TOGETHER == row[None, :] % TOGETHER)
        if EXCLUDE > 0:
            seen = seen & ~excluded((start + offset)[:, None], (start + offset)[None, :], exclusions, index, EXCLUDE)
        scores = tl.where(seen, scores, float("-inf"))

        largest = tl.max(scores, 1) * scale
        result = output + batch * output_batch + head * output_head
        totals = log_sum_exp + (batch * heads + head) * n + start + offset
        if LATER:
            before = tl.load(totals, mask=valid, other=float("-inf"))
            largest = tl.maximum(largest, before)
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores * scale - finite[:, None])
        weight = tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        if LATER:
            kept = tl.exp2(before - finite)
            weight += kept
            sums += kept[:, None] * load_rows(result, start, offset, output_row, valid, D_V, WIDTH_V, WIDE, True).to(
                tl.float32
            )
        nothing = weight == 0
        weight = tl.where(nothing, 1.0, weight)
        store_rows(sums / weight[:, None], result, start, offset, output_row, valid, D_V, WIDTH_V, WIDE)
        tl.store(totals, tl.where(nothing, float("-inf"), largest + tl.log2(weight)), mask=valid)


@triton.jit
def lane_backward(
    q, k, v, gradient, output, log_sum_exp, dq, dk, dv, jobs, exclusions,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, gradient_batch, gradient_head, gradient_row,
    output_batch, output_head, output_row,
    dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, n, job_count, tiles, total, scale, slope_scale,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, SHARED: tl.constexpr, SAME: tl.constexpr, GROUPED: tl.constexpr,
    EXCLUDE: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums are those of backward.py. Pairs lie keys down and queries across."""
    row = tl.arange(0, ROWS)
    place = row // TOGETHER
    if SAME:  # One set of offsets then serves all tensors.
        k_row = q_row
        v_row = q_row
        gradient_row = q_row
        output_row = q_row
        dq_row = q_row
        dk_row = q_row
        dv_row = q_row
    # A load that waits for another cannot be made ahead, so a job that all heads share is read before the loop.
    head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, 0)
    for program in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        index = program // tiles % job_count
        batch = (program // tiles // job_count).to(tl.int64)
        if SHARED:
            head = index.to(tl.int64)
        else:
            head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, index)
        first_lane = program % tiles * TOGETHER
        start = first_lane * lane_shift
        offset = row % TOGETHER * lane_shift + place * step
        valid = (first_lane + row % TOGETHER < lanes) & (place < limit) & (start + offset < n)

        query = load_rows(q + batch * q_batch + head * q_head, start, offset, q_row, valid, D_QK, WIDTH_QK, WIDE, True)
        keys = load_rows(k + batch * k_batch + head * k_head, start, offset, k_row, valid, D_QK, WIDTH_QK, WIDE, True)
        values = load_rows(v + batch * v_batch + head * v_head, start, offset, v_row, valid, D_V, WIDTH_V, WIDE, True)
        slopes = load_rows(
            gradient + batch * gradient_batch + head * gradient_head, start, offset, gradient_row, valid, D_V, WIDTH_V,
            WIDE, True,
        )  # fmt: skip
        results = load_rows(
            output + batch * output_batch + head * output_head, start, offset, output_row, valid, D_V, WIDTH_V, WIDE, True
        )  # fmt: skip
        totals = tl.load(log_sum_exp + (batch * heads + head) * n + start + offset, mask=valid, other=float("inf"))
        totals = without_keys(totals)
        mean = tl.sum(slopes.to(tl.float32) * results.to(tl.float32), 1)

        scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION)
        seen = window_sees(place[None, :], place[:, None], near, far, own, block, cells, first_cell, GROUPED)
        if TOGETHER > 1:
            seen = seen & (row[:, None] % TOGETHER == row[None, :] % TOGETHER)
        if EXCLUDE > 0:
            seen = seen & ~excluded((start + offset)[None, :], (start + offset)[:, None], exclusions, index, EXCLUDE)
        weights = tl.where(seen, tl.exp2(scores * scale - totals[None, :]), 0.0)

        dv_head_start = dv + batch * dv_batch + head * dv_head
        dv_sum = tl.dot(weights.to(slopes.dtype), slopes, input_precision=PRECISION)
        if LATER:
            dv_sum += load_rows(dv_head_start, start, offset, dv_row, valid, D_V, WIDTH_V, WIDE, True).to(tl.float32)
        store_rows(dv_sum, dv_head_start, start, offset, dv_row, valid, D_V, WIDTH_V, WIDE)

        weight_slopes = tl.dot(values, tl.trans(slopes), input_precision=PRECISION)
        score_slopes = (weights * (weight_slopes - mean[None, :])).to(query.dtype)
        dk_head_start = dk + batch * dk_batch + head * dk_head
        dk_sum = tl.dot(score_slopes, query, input_precision=PRECISION) * slope_scale
        if LATER:
            dk_sum += load_rows(dk_head_start, start, offset, dk_row, valid, D_QK, WIDTH_QK, WIDE, True).to(tl.float32)
        store_rows(dk_sum, dk_head_start, start, offset, dk_row, valid, D_QK, WIDTH_QK, WIDE)

        dq_head_start = dq + batch * dq_batch + head * dq_head
        dq_sum = tl.dot(tl.trans(score_slopes), keys, input_precision=PRECISION) * slope_scale
        if LATER:
            dq_sum += load_rows(dq_head_start, start, offset, dq_row, valid, D_QK, WIDTH_QK, WIDE, True).to(tl.float32)
        store_rows(dq_sum, dq_head_start, start, offset, dq_row, valid, D_QK, WIDTH_QK, WIDE)
