"""Triton kernels that normalise and rotate the queries and keys of a packed tensor, and copy its values.

A row is a position of a sequence. Its columns are heads of d_qk each: queries, keys, and values, as if these had such heads.
A program takes some rows and a group of heads, one head after the other, with the angles of its rows in registers.
"""

# mypy: ignore-errors
# Triton compiles a part of this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl
from torch import Tensor

from longstride.attention.kernels.launch import Launch
from longstride.model.layers import EPSILON, QK_FACTOR
from longstride.model.residual_kernels import launch_sum_rows, run_plan

ELEMENTS = 1024
"""Of one half of a head, in a program at a time."""
TOGETHER = 2
"""Heads of a program."""
WARPS = 4
FACTOR: tl.constexpr = tl.constexpr(QK_FACTOR)
LEAST: tl.constexpr = tl.constexpr(EPSILON)


def forward(
    packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, result: Tensor, d_qk: int, heads: int
) -> None:
    """Fills the result from packed [batch, n, q | k | v]."""
    _run(query_key_forward, [packed, rotation, query_scale, result], d_qk, heads)


def backward(
    d_result: Tensor, packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_packed: Tensor,
    d_scale: Tensor | None, d_qk: int, heads: int,
) -> None:  # fmt: skip
    """Fills the gradients of the packed tensor, and of the scale [heads], if there is one."""
    _run(query_key_backward, [d_result, packed, rotation, query_scale, d_packed, d_scale], d_qk, heads)


def _run(kernel, tensors: list[Tensor | None], d_qk: int, heads: int) -> None:
    _, n, width = tensors[0].shape
    rows, block = tensors[0].numel() // width, triton.next_power_of_2(d_qk // 2)
    together = max(1, ELEMENTS // block)
    tiles, groups = triton.cdiv(rows, together), triton.cdiv(width // d_qk, TOGETHER)

    def launches(tensors, workspace):
        constants = d_qk, heads, width, groups, TOGETHER, block, together
        if kernel is query_key_forward:
            return [Launch(kernel, tiles * groups, (*tensors, rows, n, *constants), {"num_warps": WARPS})]
        *tensors, d_scale = tensors
        partial = None if d_scale is None else workspace.new(tiles, heads)
        launch = Launch(kernel, tiles * groups, (*tensors, partial, rows, n, *constants), {"num_warps": WARPS})
        return [launch] if d_scale is None else [launch, launch_sum_rows(partial, d_scale, tiles)]

    run_plan((kernel.fn.__name__, rows, n, width, d_qk, heads), tensors, launches)


@triton.jit(do_not_specialize=["n"])
def query_key_forward(
    packed, rotation, query_scale, result, rows, n,
    SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, cos, sin = angles(rotation, rows, n, SIZE, GROUPS, BLOCK, ROWS)
    for number in tl.static_range(TOGETHER):
        head = tl.program_id(0) % GROUPS * TOGETHER + number
        place, inside = places(row, column, head, rows, SIZE, WIDTH)
        x = tl.load(packed + place, inside, 0.0).to(tl.float32)
        z = tl.load(packed + place + SIZE // 2, inside, 0.0).to(tl.float32)
        first, second = x, z
        if query_scale is not None:
            r = row_scale(x, z, SIZE) * factor_of(query_scale, head, HEADS)
            first, second = x * r[:, None], z * r[:, None]
        if rotation is not None:
            first, second = first * cos - second * sin, first * sin + second * cos
        is_value = head >= 2 * HEADS
        tl.store(result + place, tl.where(is_value, x, first), inside)
        tl.store(result + place + SIZE // 2, tl.where(is_value, z, second), inside)


@triton.jit(do_not_specialize=["n"])
def query_key_backward(
    d_result, packed, rotation, query_scale, d_packed, partial, rows, n,
    SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """partial: sums of each tile of rows for the gradient of the scale [tiles, heads]."""
    row, column, cos, sin = angles(rotation, rows, n, SIZE, GROUPS, BLOCK, ROWS)
    for number in tl.static_range(TOGETHER):
        head = tl.program_id(0) % GROUPS * TOGETHER + number
        place, inside = places(row, column, head, rows, SIZE, WIDTH)
        d_first = tl.load(d_result + place, inside, 0.0).to(tl.float32)
        d_second = tl.load(d_result + place + SIZE // 2, inside, 0.0).to(tl.float32)
        d_x, d_z = d_first, d_second
        if rotation is not None:
            d_x, d_z = d_first * cos + d_second * sin, d_second * cos - d_first * sin
        if query_scale is not None:
            # Values are only copied, and need not be read.
            needed = inside & (head < 2 * HEADS)
            x = tl.load(packed + place, needed, 0.0).to(tl.float32)
            z = tl.load(packed + place + SIZE // 2, needed, 0.0).to(tl.float32)
            r = row_scale(x, z, SIZE)[:, None]
            x, z = x * r, z * r
            product = tl.sum(d_x * x + d_z * z, 1)
            tl.store(partial + tl.program_id(0) // GROUPS * HEADS + head, tl.sum(product, 0) * FACTOR, head < HEADS)
            average = (product / SIZE)[:, None]
            r *= factor_of(query_scale, head, HEADS)
            d_x, d_z = r * (d_x - x * average), r * (d_z - z * average)
        is_value = head >= 2 * HEADS
        tl.store(d_packed + place, tl.where(is_value, d_first, d_x), inside)
        tl.store(d_packed + place + SIZE // 2, tl.where(is_value, d_second, d_z), inside)


@triton.jit
def angles(
    rotation, rows, n, SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns the rows of a program, the columns of half a head, and cosines and sines [ROWS, BLOCK] if there are angles."""
    row = tl.program_id(0) // GROUPS * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    cos, sin = 1.0, 0.0
    if rotation is not None:
        place = (row % n).to(tl.int64)[:, None] * (SIZE // 2) + column[None, :]
        inside = (row < rows)[:, None] & (column < SIZE // 2)[None, :]
        cos = tl.load(rotation + place, inside, 0.0).to(tl.float32)
        sin = tl.load(rotation + n.to(tl.int64) * (SIZE // 2) + place, inside, 0.0).to(tl.float32)
    return row, column, cos, sin


@triton.jit
def places(row, column, head, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of the first half of a head in these rows, and which of them exist."""
    inside = (row < rows)[:, None] & (column < SIZE // 2)[None, :] & (head < WIDTH // SIZE)
    return row.to(tl.int64)[:, None] * WIDTH + head * SIZE + column[None, :], inside


@triton.jit
def row_scale(x, z, SIZE: tl.constexpr):
    """1 / root mean square of the heads whose halves are x and z."""
    return tl.rsqrt(tl.sum(x * x + z * z, 1) / SIZE + LEAST)


@triton.jit
def factor_of(query_scale, head, HEADS: tl.constexpr):
    """What a normalised head is multiplied by: queries by their scale, keys by 1."""
    scale = tl.load(query_scale + head, head < HEADS, 0.0).to(tl.float32)
    return tl.where(head < HEADS, scale * FACTOR, 1.0)
