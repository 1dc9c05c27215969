"""forward: the output, and of every query the log-sum-exp of its scores, in base 2.

A program owns a tile of queries and passes over the keys that they see, the summary cells of earlier lanes first and then
the window in its own lane, with the online softmax: `running_max` is the largest score so far, `weight` the sum of
2 ** (score - running_max), `accumulator` the same sum with the values. Scores are in bits: `scale` includes log2(e).
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.primitives import (
    LOWEST,
    cell_tile,
    excluded,
    lane_length,
    load_rows,
    locate,
    read_job,
    store_rows,
    unmasked_keys,
    window_sees,
)


@triton.jit
def take_in(accumulator, weight, running_max, scores, value, scale, PRECISION: tl.constexpr):
    """The state after a tile of scores. `running_max` begins at LOWEST, not -inf, so that a score of -inf weighs 0."""
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    shrink = tl.exp2(running_max - new_max)
    weight = weight * shrink + tl.sum(weights, 1)
    accumulator = tl.dot(
        weights.to(value.dtype), value, accumulator * shrink[:, None], input_precision=PRECISION, out_dtype=tl.float32
    )
    return accumulator, weight, new_max


@triton.jit
def over_window(
    accumulator, weight, running_max, query, row, k, v, k_row, v_row, first, end, last, lane_start, step, near, far, own,
    block, cells, first_cell, scale, exclusions, index,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, GROUPED: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys [first, end) of the own lane, in tiles; those from `last` on are not there."""
    offset = tl.arange(0, COLUMNS)
    for start in tl.range(first, end, COLUMNS):
        key = start + offset
        base = lane_start + start * step
        keys = load_rows(k, base, offset * step, k_row, key < last, D_QK, WIDTH_QK, WIDE, MASKED)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            seen = window_sees(row[:, None], key[None, :], near, far, own, block, cells, first_cell, GROUPED)
            seen = seen & (key < last)[None, :]
            if EXCLUDE > 0:
                position = lane_start + key * step
                seen = seen & ~excluded((lane_start + row * step)[:, None], position[None, :], exclusions, index, EXCLUDE)
            scores = tl.where(seen, scores, float("-inf"))
        values = load_rows(v, base, offset * step, v_row, key < last, D_V, WIDTH_V, WIDE, MASKED)
        accumulator, weight, running_max = take_in(accumulator, weight, running_max, scores, values, scale, PRECISION)
    return accumulator, weight, running_max


@triton.jit
def over_cells(
    accumulator, weight, running_max, query, query_position, k, v, k_row, v_row, first, end, last, block, cells, first_cell,
    scale, exclusions, index,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The summary cells [first, end) of earlier lanes, in tiles; those from `last` on are not seen."""
    offset = tl.arange(0, COLUMNS)
    for start in tl.range(first, end, COLUMNS):
        base, place = cell_tile(start, offset, cells, block, first_cell, EVEN)
        valid = start + offset < last
        keys = load_rows(k, base, place, k_row, valid, D_QK, WIDTH_QK, WIDE, MASKED)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            seen = valid[None, :]
            if EXCLUDE > 0:
                seen = seen & ~excluded(query_position[:, None], (base + place)[None, :], exclusions, index, EXCLUDE)
            scores = tl.where(seen, scores, float("-inf"))
        values = load_rows(v, base, place, v_row, valid, D_V, WIDTH_V, WIDE, MASKED)
        accumulator, weight, running_max = take_in(accumulator, weight, running_max, scores, values, scale, PRECISION)
    return accumulator, weight, running_max


@triton.jit
def forward(
    q, k, v, output, log_sum_exp, jobs, exclusions,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, output_batch, output_head, output_row,
    heads, n, job_count, tiles, scale,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMARY: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    SHORT: tl.constexpr, EXCLUDE: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LATER: this is not the first pass over these heads, and goes on from what the last one left."""
    program = tl.program_id(0)
    index = program // tiles % job_count
    batch = (program // tiles // job_count).to(tl.int64)
    head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, index)
    lane, first_row = locate(program % tiles, lanes, limit, ROWS)
    lane_start = lane * lane_shift
    length = lane_length(lane, lane_shift, step, limit, n)
    if first_row < length:
        q += batch * q_batch + head * q_head
        k += batch * k_batch + head * k_head
        v += batch * v_batch + head * v_head
        output += batch * output_batch + head * output_head
        log_sum_exp += (batch * heads + head) * n

        row = first_row + tl.arange(0, ROWS)
        valid = row < length
        position = lane_start + row * step
        query = load_rows(q, lane_start, row * step, q_row, valid, D_QK, WIDTH_QK, WIDE, True)
        if LATER:
            earlier = tl.load(log_sum_exp + position, mask=valid, other=0.0)
            weight = tl.where(earlier == float("-inf"), 0.0, 1.0)
            running_max = tl.where(earlier == float("-inf"), LOWEST, earlier)
            accumulator = load_rows(output, lane_start, row * step, output_row, valid, D_V, WIDTH_V, WIDE, True).to(
                tl.float32
            )
        else:
            running_max = tl.full([ROWS], LOWEST, tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            accumulator = tl.zeros([ROWS, WIDTH_V], tl.float32)

        if SUMMARY:
            before = lane * (lane_shift // block) * cells
            whole = before // COLUMNS * COLUMNS
            if EXCLUDE > 0:
                whole = 0
            else:
                accumulator, weight, running_max = over_cells(
                    accumulator, weight, running_max, query, position, k, v, k_row, v_row, 0, whole, before, block, cells,
                    first_cell, scale, exclusions, index,
                    D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, False, EVEN, EXCLUDE, PRECISION,
                )  # fmt: skip
            accumulator, weight, running_max = over_cells(
                accumulator, weight, running_max, query, position, k, v, k_row, v_row, whole, before, before, block, cells,
                first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, EVEN, EXCLUDE, PRECISION,
            )  # fmt: skip

        # The keys are [first, end). A tile that starts in [inner, outer) needs no mask; but where there are few tiles, one
        # loop that loads ahead is faster than three that do not.
        first = tl.maximum(0, first_row - far)
        end = tl.minimum(length, first_row + ROWS - near)
        if SHORT:
            accumulator, weight, running_max = over_window(
                accumulator, weight, running_max, query, row, k, v, k_row, v_row, first, end, end, lane_start,
                step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
        else:
            inner, outer = unmasked_keys(first, first_row, near, far, own, block, limit, ROWS, COLUMNS)
            accumulator, weight, running_max = over_window(
                accumulator, weight, running_max, query, row, k, v, k_row, v_row, first, tl.minimum(inner, end), end,
                lane_start, step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            accumulator, weight, running_max = over_window(
                accumulator, weight, running_max, query, row, k, v, k_row, v_row, inner, outer, end, lane_start,
                step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, False, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            accumulator, weight, running_max = over_window(
                accumulator, weight, running_max, query, row, k, v, k_row, v_row, outer, end, end, lane_start,
                step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip

        nothing = weight == 0
        result = accumulator / tl.where(nothing, 1.0, weight)[:, None]
        store_rows(result, output, lane_start, row * step, output_row, valid, D_V, WIDTH_V, WIDE)
        total = tl.where(nothing, float("-inf"), running_max + tl.log2(tl.where(nothing, 1.0, weight)))
        tl.store(log_sum_exp + position, total, mask=valid)
