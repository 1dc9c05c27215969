"""add_pairs: what 64 keys and 64 queries add to dq, dk and dv, for lane_backward and walk_backward.

Pairs lie keys down and queries across, so that the products for dv and dk take the weights and the gradients of scores from
registers. For dq the gradients of scores pass through shared memory, where they lie queries down.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper import lane_tiles
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout, operand_layout


class QueryTile(NamedTuple):
    """64 queries, in shared memory."""

    q: Any
    d_output: Any  # in panels, as the values are
    lse: Any
    delta: Any


@gluon.jit
def add_pairs(
    sums, queries, keys, d_scores_tile, scale, zero,
    OFFSET: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr, PART: gl.constexpr,
    FIRST_KEYS: gl.constexpr, FIRST_QUERIES: gl.constexpr,
):  # fmt: skip
    """The sums of dq, dk and dv after these pairs. Those count that are NEAR to FAR apart; row r is OFFSET + r - c from key
    c. keys: k, and v in panels (lane_tiles.py), as the sum of dv is.

    PART queries at a time: fewer take fewer registers. `zero` is 0, and keeps the masks from being made before the loop.
    FIRST_KEYS: the first that these queries see, so dq_sum is still empty. FIRST_QUERIES: so are dk_sum and dv_sum.
    """
    dq_sum, dk_sum, dv_sum = sums
    key, value = keys
    layout: gl.constexpr = mma_layout(PART)
    sum_layout: gl.constexpr = dq_sum.type.layout
    zeros = gl.zeros([ROWS, PART], gl.float32, layout)
    for part in gl.static_range(ROWS // PART):
        query, d_output = queries.q.slice(part * PART, PART), lane_tiles.rows_of(queries.d_output, part * PART, PART)
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_weights = lane_tiles.multiply_panels(value, d_output, zeros)
        scores, d_weights = warpgroup_mma_wait(0, deps=(scores, d_weights))
        lse = queries.lse.slice(part * PART, PART).load(gl.SliceLayout(0, layout))
        weights = gl.exp2(scores * scale - lse[None, :])
        column = zero + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        row = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
        if OFFSET - ROWS + 1 < NEAR:
            weights = gl.where(column[:, None] <= row[None, :] + (OFFSET - NEAR), weights, 0.0)
        if OFFSET + ROWS - 1 > FAR:
            weights = gl.where(column[:, None] >= row[None, :] + (OFFSET - FAR), weights, 0.0)
        dv_sum = lane_tiles.add_products(weights, d_output, dv_sum, part > 0 or not FIRST_QUERIES)
        delta = queries.delta.slice(part * PART, PART).load(gl.SliceLayout(0, layout))
        d_scores = (weights * (d_weights - delta[None, :])).to(query.dtype)
        d_scores_tile.slice(part * PART, PART).permute((1, 0)).store(d_scores)
        operand = gl.convert_layout(d_scores, operand_layout(sum_layout))
        dk_sum = warpgroup_mma(operand, query, dk_sum, use_acc=part > 0 or not FIRST_QUERIES, is_async=True)
        if part + 1 < ROWS // PART:
            done = warpgroup_mma_wait(0, deps=(dk_sum,) + dv_sum)
            dk_sum, dv_sum = done[0], done[1:]
    fence_async_shared()
    dq_sum = warpgroup_mma(d_scores_tile, key, dq_sum, use_acc=not FIRST_KEYS, is_async=True)
    done = warpgroup_mma_wait(0, deps=(dq_sum, dk_sum) + dv_sum)
    return done[0], done[1], done[2:]
