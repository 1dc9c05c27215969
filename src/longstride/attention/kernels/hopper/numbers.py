"""backward_numbers: what the backward kernels need of every query, side by side: log-sum-exp and mean, as one row each."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.backward import mean_of_rows
from longstride.attention.kernels.primitives import without_keys


@triton.jit
def backward_numbers(
    gradient, output, log_sum_exp, numbers,
    gradient_batch, gradient_head, gradient_row, output_batch, output_head, output_row,
    heads, n, padded, tiles, step, along,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Lane by lane: those of a residue class modulo the step, of which there are `along`, lie side by side.

    A query without keys gets the log-sum-exp inf: its weights are then 0, not NaN.
    """
    total, number, row, valid = mean_of_rows(
        gradient, output, tl.program_id(0), gradient_batch, gradient_head, gradient_row, output_batch, output_head,
        output_row, heads, n, tiles, D_V, WIDTH_V, True, ROWS,
    )  # fmt: skip
    bits = tl.load(log_sum_exp + number * n + row, mask=valid, other=0.0)
    numbers += number * 2 * padded + row % step * along + row // step
    tl.store(numbers, without_keys(bits), mask=valid)
    tl.store(numbers + padded, total, mask=valid)
