"""backward_numbers: what the backward kernels need of every query, side by side: lse and delta, as one row each."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.backward import delta_of_rows
from longstride.attention.kernels.primitives import without_keys


@triton.jit
def backward_numbers(
    d_output, output, lse, row_stats, sizes, padded, step, along, ROW: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Lane by lane: those of a residue class modulo the step, of which there are `along`, lie side by side.

    A query without keys gets the lse inf: its weights are then 0, not NaN.
    """
    delta, number, row, valid = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    bits = tl.load(lse + number * sizes.n + row, mask=valid, other=0.0)
    row_stats += number * 2 * padded + row % step * along + row // step
    tl.store(row_stats, without_keys(bits), mask=valid)
    tl.store(row_stats + padded, delta, mask=valid)
