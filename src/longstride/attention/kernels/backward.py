"""backward_mean, backward_dq, backward_dkv: the gradients, from weights that are computed again.

With the score s = scale * q k^T and the weight w = exp(s) / sum(exp(s)) of a pair, and the output's gradient do:

    dv = sum over queries of w * do            ds = w * (do v^T - mean),  where mean = sum over values of do * output
    dq = scale * sum over keys of ds * k       dk = scale * sum over queries of ds * q

w comes from q, k and the query's log-sum-exp; so nothing is stored for a pair. backward_dq owns a tile of queries and
backward_dkv one of keys: each gradient is summed by one program in one order, and comes out the same every time.
`scale` is in bits here too, as the log-sum-exp is; `slope_scale` is the plain one.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.primitives import (
    cell_tile,
    excluded,
    lane_length,
    load_rows,
    locate,
    read_job,
    store_rows,
    unmasked_keys,
    window_sees,
    without_keys,
)


@triton.jit
def mean_of_rows(
    gradient, output, program,
    gradient_batch, gradient_head, gradient_row, output_batch, output_head, output_row, heads, n, tiles,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """mean = sum over values of do * output for a program's queries; with it their head's number, and which are there."""
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    valid = row < n
    gradient += batch * gradient_batch + head * gradient_head
    output += batch * output_batch + head * output_head
    slopes = load_rows(gradient, program * 0, row, gradient_row, valid, D_V, WIDTH_V, WIDE, True)
    values = load_rows(output, program * 0, row, output_row, valid, D_V, WIDTH_V, WIDE, True)
    return tl.sum(slopes.to(tl.float32) * values.to(tl.float32), 1), batch * heads + head, row, valid


@triton.jit
def backward_mean(
    gradient, output, mean,
    gradient_batch, gradient_head, gradient_row, output_batch, output_head, output_row,
    heads, n, tiles,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """mean = sum over values of do * output, for every query."""
    total, number, row, valid = mean_of_rows(
        gradient, output, tl.program_id(0), gradient_batch, gradient_head, gradient_row, output_batch, output_head,
        output_row, heads, n, tiles, D_V, WIDTH_V, WIDE, ROWS,
    )  # fmt: skip
    tl.store(mean + number * n + row, total, mask=valid)


@triton.jit
def add_dq(
    dq, query, slopes, log_sum_exp, mean, keys, values, seen, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    weights = tl.exp2(scores * scale - log_sum_exp[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    weight_slopes = tl.dot(slopes, tl.trans(values), input_precision=PRECISION)
    score_slopes = weights * (weight_slopes - mean[:, None])
    return tl.dot(score_slopes.to(keys.dtype), keys, dq, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def dq_over_window(
    dq, query, slopes, log_sum_exp, mean, row, k, v, k_row, v_row, first, end, last, lane_start, step, near, far, own,
    block, cells, first_cell, scale, exclusions, index,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, GROUPED: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, COLUMNS)
    for start in tl.range(first, end, COLUMNS):
        key = start + offset
        base = lane_start + start * step
        keys = load_rows(k, base, offset * step, k_row, key < last, D_QK, WIDTH_QK, WIDE, MASKED)
        values = load_rows(v, base, offset * step, v_row, key < last, D_V, WIDTH_V, WIDE, MASKED)
        seen = (key < last)[None, :]
        if MASKED:
            seen = seen & window_sees(row[:, None], key[None, :], near, far, own, block, cells, first_cell, GROUPED)
            if EXCLUDE > 0:
                position = lane_start + key * step
                seen = seen & ~excluded((lane_start + row * step)[:, None], position[None, :], exclusions, index, EXCLUDE)
        dq = add_dq(dq, query, slopes, log_sum_exp, mean, keys, values, seen, scale, MASKED, PRECISION)
    return dq


@triton.jit
def dq_over_cells(
    dq, query, slopes, log_sum_exp, mean, query_position, k, v, k_row, v_row, first, end, last, block, cells, first_cell,
    scale, exclusions, index,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, COLUMNS)
    for start in tl.range(first, end, COLUMNS):
        base, place = cell_tile(start, offset, cells, block, first_cell, EVEN)
        valid = start + offset < last
        keys = load_rows(k, base, place, k_row, valid, D_QK, WIDTH_QK, WIDE, MASKED)
        values = load_rows(v, base, place, v_row, valid, D_V, WIDTH_V, WIDE, MASKED)
        seen = valid[None, :]
        if EXCLUDE > 0:
            seen = seen & ~excluded(query_position[:, None], (base + place)[None, :], exclusions, index, EXCLUDE)
        dq = add_dq(dq, query, slopes, log_sum_exp, mean, keys, values, seen, scale, MASKED, PRECISION)
    return dq


@triton.jit
def backward_dq(
    q, k, v, gradient, log_sum_exp, mean, dq, jobs, exclusions,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, gradient_batch, gradient_head, gradient_row,
    dq_batch, dq_head, dq_row,
    heads, n, job_count, tiles, scale, slope_scale,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMARY: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    SHORT: tl.constexpr, EXCLUDE: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles and ranges are those of forward."""
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
        gradient += batch * gradient_batch + head * gradient_head
        dq += batch * dq_batch + head * dq_head
        log_sum_exp += (batch * heads + head) * n
        mean += (batch * heads + head) * n

        row = first_row + tl.arange(0, ROWS)
        valid = row < length
        position = lane_start + row * step
        query = load_rows(q, lane_start, row * step, q_row, valid, D_QK, WIDTH_QK, WIDE, True)
        slopes = load_rows(gradient, lane_start, row * step, gradient_row, valid, D_V, WIDTH_V, WIDE, True)
        row_log_sum_exp = without_keys(tl.load(log_sum_exp + position, mask=valid, other=float("inf")))
        row_mean = tl.load(mean + position, mask=valid, other=0.0)
        total = tl.zeros([ROWS, WIDTH_QK], tl.float32)

        if SUMMARY:
            before = lane * (lane_shift // block) * cells
            whole = before // COLUMNS * COLUMNS
            if EXCLUDE > 0:
                whole = 0
            else:
                total = dq_over_cells(
                    total, query, slopes, row_log_sum_exp, row_mean, position, k, v, k_row, v_row, 0, whole, before, block,
                    cells, first_cell, scale, exclusions, index,
                    D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, False, EVEN, EXCLUDE, PRECISION,
                )  # fmt: skip
            total = dq_over_cells(
                total, query, slopes, row_log_sum_exp, row_mean, position, k, v, k_row, v_row, whole, before, before, block,
                cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, EVEN, EXCLUDE, PRECISION,
            )  # fmt: skip

        first = tl.maximum(0, first_row - far)
        end = tl.minimum(length, first_row + ROWS - near)
        if SHORT:
            total = dq_over_window(
                total, query, slopes, row_log_sum_exp, row_mean, row, k, v, k_row, v_row, first, end, end,
                lane_start, step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
        else:
            inner, outer = unmasked_keys(first, first_row, near, far, own, block, limit, ROWS, COLUMNS)
            total = dq_over_window(
                total, query, slopes, row_log_sum_exp, row_mean, row, k, v, k_row, v_row, first, tl.minimum(inner, end), end,
                lane_start, step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            total = dq_over_window(
                total, query, slopes, row_log_sum_exp, row_mean, row, k, v, k_row, v_row, inner, outer, end,
                lane_start, step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, False, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            total = dq_over_window(
                total, query, slopes, row_log_sum_exp, row_mean, row, k, v, k_row, v_row, outer, end, end,
                lane_start, step, near, far, own, block, cells, first_cell, scale, exclusions, index,
                D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, COLUMNS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip

        total *= slope_scale
        if LATER:
            total += load_rows(dq, lane_start, row * step, dq_row, valid, D_QK, WIDTH_QK, WIDE, True).to(tl.float32)
        store_rows(total, dq, lane_start, row * step, dq_row, valid, D_QK, WIDTH_QK, WIDE)


@triton.jit
def add_dkv(
    dk, dv, keys, values, key, key_position, q, gradient, log_sum_exp, mean, q_row, gradient_row, first, end, length,
    lane_start, step, near, far, own, block, cells, first_cell, seen_from, scale, exclusions, index,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CELLS: tl.constexpr, MASKED: tl.constexpr, GROUPED: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries [first, end) of a lane, in tiles. Pairs lie keys down and queries across: both sums want them so."""
    offset = tl.arange(0, ROWS)
    for start in tl.range(first, end, ROWS):
        row = start + offset
        valid = row < length
        base = lane_start + start * step
        position = base + offset * step
        query = load_rows(q, base, offset * step, q_row, valid, D_QK, WIDTH_QK, WIDE, True)
        # A row that is not there has weight 0: 2 ** (0 - inf).
        row_log_sum_exp = without_keys(tl.load(log_sum_exp + position, mask=valid, other=float("inf")))
        scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION)
        weights = tl.exp2(scores * scale - row_log_sum_exp[None, :])
        if MASKED:
            if CELLS:
                seen = row[None, :] >= seen_from[:, None]
            else:
                seen = window_sees(row[None, :], key[:, None], near, far, own, block, cells, first_cell, GROUPED)
            seen = seen & valid[None, :]
            if EXCLUDE > 0:
                seen = seen & ~excluded(position[None, :], key_position[:, None], exclusions, index, EXCLUDE)
            weights = tl.where(seen, weights, 0.0)
        slopes = load_rows(gradient, base, offset * step, gradient_row, valid, D_V, WIDTH_V, WIDE, True)
        dv = tl.dot(weights.to(slopes.dtype), slopes, dv, input_precision=PRECISION, out_dtype=tl.float32)
        weight_slopes = tl.dot(values, tl.trans(slopes), input_precision=PRECISION)
        row_mean = tl.load(mean + position, mask=valid, other=0.0)
        score_slopes = weights * (weight_slopes - row_mean[None, :])
        dk = tl.dot(score_slopes.to(query.dtype), query, dk, input_precision=PRECISION, out_dtype=tl.float32)
    return dk, dv


@triton.jit
def backward_dkv(
    q, k, v, gradient, log_sum_exp, mean, dk, dv, jobs, exclusions,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, gradient_batch, gradient_head, gradient_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, n, job_count, tiles, scale, slope_scale,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CELLS: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    SHORT: tl.constexpr, EXCLUDE: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """CELLS: the keys are summary cells and the queries those of all later lanes; or else both are in one lane's window."""
    program = tl.program_id(0)
    tile = program % tiles
    index = program // tiles % job_count
    batch = (program // tiles // job_count).to(tl.int64)
    head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell = read_job(jobs, index)
    offset = tl.arange(0, COLUMNS)
    if CELLS:
        lane_start = 0
        length = n
        in_lane = lane_shift // block * cells
        key_count = (lanes - 1) * in_lane
        first_key = tile * COLUMNS
    else:
        lane, first_key = locate(tile, lanes, limit, COLUMNS)
        lane_start = lane * lane_shift
        length = lane_length(lane, lane_shift, step, limit, n)
        key_count = length
    if first_key < key_count:
        q += batch * q_batch + head * q_head
        k += batch * k_batch + head * k_head
        v += batch * v_batch + head * v_head
        gradient += batch * gradient_batch + head * gradient_head
        dk += batch * dk_batch + head * dk_head
        dv += batch * dv_batch + head * dv_head
        log_sum_exp += (batch * heads + head) * n
        mean += (batch * heads + head) * n

        key = first_key + offset
        valid = key < key_count
        if CELLS:
            base, place = cell_tile(first_key, offset, cells, block, first_cell, EVEN)
            seen_from = (key // in_lane + 1) * lane_shift
            first = (first_key // in_lane + 1) * lane_shift
            end = n
        else:
            base = lane_start + first_key * step
            place = offset * step
            seen_from = key
            first = first_key + near
            end = tl.minimum(length, first_key + COLUMNS + far)
        position = base + place
        keys = load_rows(k, base, place, k_row, valid, D_QK, WIDTH_QK, WIDE, True)
        values = load_rows(v, base, place, v_row, valid, D_V, WIDTH_V, WIDE, True)
        dk_total = tl.zeros([COLUMNS, WIDTH_QK], tl.float32)
        dv_total = tl.zeros([COLUMNS, WIDTH_V], tl.float32)

        # The queries are [first, end). All of a tile of them that starts in [inner, outer) see all keys, and need no mask.
        if SHORT:
            dk_total, dv_total = add_dkv(
                dk_total, dv_total, keys, values, key, position, q, gradient, log_sum_exp, mean, q_row, gradient_row, first,
                end, length, lane_start, step, near, far, own, block, cells, first_cell, seen_from, scale, exclusions,
                index, D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, ROWS, CELLS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
        else:
            bound = tl.maximum(first, end)
            if CELLS:
                last_key = tl.minimum(first_key + COLUMNS, key_count) - 1
                inner = first + tl.cdiv((last_key // in_lane + 1) * lane_shift - first, ROWS) * ROWS
                outer = bound
            else:
                inner = first + tl.cdiv(COLUMNS - 1, ROWS) * ROWS
                outer = inner + tl.maximum(0, tl.minimum(first_key + far + 1, length) - inner) // ROWS * ROWS
                if (own == 0) | (block < limit):
                    inner = bound
            inner = tl.minimum(inner, bound)
            outer = tl.maximum(inner, tl.minimum(outer, bound))
            dk_total, dv_total = add_dkv(
                dk_total, dv_total, keys, values, key, position, q, gradient, log_sum_exp, mean, q_row, gradient_row, first,
                inner, length, lane_start, step, near, far, own, block, cells, first_cell, seen_from, scale, exclusions,
                index, D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, ROWS, CELLS, True, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            dk_total, dv_total = add_dkv(
                dk_total, dv_total, keys, values, key, position, q, gradient, log_sum_exp, mean, q_row, gradient_row, inner,
                outer, length, lane_start, step, near, far, own, block, cells, first_cell, seen_from, scale, exclusions,
                index, D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, ROWS, CELLS, False, GROUPED, EXCLUDE, PRECISION,
            )  # fmt: skip
            if not CELLS:
                dk_total, dv_total = add_dkv(
                    dk_total, dv_total, keys, values, key, position, q, gradient, log_sum_exp, mean, q_row, gradient_row,
                    outer, end, length, lane_start, step, near, far, own, block, cells, first_cell, seen_from, scale,
                    exclusions, index, D_QK, D_V, WIDTH_QK, WIDTH_V, WIDE, ROWS, CELLS, True, GROUPED, EXCLUDE, PRECISION,
                )  # fmt: skip

        dk_total *= slope_scale
        if LATER:
            dk_total += load_rows(dk, base, place, dk_row, valid, D_QK, WIDTH_QK, WIDE, True).to(tl.float32)
            dv_total += load_rows(dv, base, place, dv_row, valid, D_V, WIDTH_V, WIDE, True).to(tl.float32)
        store_rows(dk_total, dk, base, place, dk_row, valid, D_QK, WIDTH_QK, WIDE)
        store_rows(dv_total, dv, base, place, dv_row, valid, D_V, WIDTH_V, WIDE)
