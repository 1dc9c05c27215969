"""backward_numbers: what the backward kernels need of every query, side by side: log-sum-exp and mean, as one row each."""

import triton
import triton.language as tl

from longstride.attention.kernels.primitives import load_rows


@triton.jit
def backward_numbers(
    gradient, output, log_sum_exp, numbers,
    gradient_batch, gradient_head, gradient_row, output_batch, output_head, output_row,
    heads, n, padded, tiles,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """mean = sum over values of do * output. A query without keys gets log-sum-exp inf: its weights are then 0, not NaN."""
    program = tl.program_id(0)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    valid = row < n
    gradient += batch * gradient_batch + head * gradient_head
    output += batch * output_batch + head * output_head
    slopes = load_rows(gradient, program * 0, row, gradient_row, valid, D_V, WIDTH_V, True, True)
    values = load_rows(output, program * 0, row, output_row, valid, D_V, WIDTH_V, True, True)
    total = tl.sum(slopes.to(tl.float32) * values.to(tl.float32), 1)
    bits = tl.load(log_sum_exp + (batch * heads + head) * n + row, mask=valid, other=0.0)
    numbers += (batch * heads + head) * 2 * padded + row
    tl.store(numbers, tl.where(bits == float("-inf"), float("inf"), bits), mask=valid)
    tl.store(numbers + padded, total, mask=valid)
