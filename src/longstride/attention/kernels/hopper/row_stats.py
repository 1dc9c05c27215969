"""backward_row_stats: lse and delta of every query, which the backward kernels read, as one row each."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.backward import delta_of_rows
from longstride.attention.kernels.primitives import without_keys


@triton.jit
def backward_row_stats(
    d_output, output, lse, row_stats, sizes, padded, step, along, ROW: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Lane by lane: the stats of a residue class modulo the step lie side by side, `along` of them.

    A query without keys gets the lse inf: its weights are then 0, not NaN.
    """
    delta, head, row, valid = delta_of_rows(d_output, output, sizes, ROW, ROWS)
    total = tl.load(lse + head * sizes.n + row, mask=valid, other=0.0)
    row_stats += head * 2 * padded + row % step * along + row // step
    tl.store(row_stats, without_keys(total), mask=valid)
    tl.store(row_stats + padded, delta, mask=valid)
