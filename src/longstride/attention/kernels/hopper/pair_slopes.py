"""What lane_backward and walk_backward share. add_pairs: what 64 keys and 64 queries add to the gradients.

Pairs lie keys down and queries across, so that the products for dv and dk take the weights and slopes from registers; only
for dq do the slopes pass through shared memory, where they lie queries down.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def without_keys(log_sum_exp):
    """As in primitives.py."""
    return gl.where(log_sum_exp == float("-inf"), float("inf"), log_sum_exp)


@gluon.jit
def add_pairs(
    dq_sum, dk_sum, dv_sum, q_tile, keys, values, gradient_tile, slopes_tile, totals, means, scale, zero,
    OFFSET: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr, PART: gl.constexpr,
    QUERIES_NEW: gl.constexpr, KEYS_NEW: gl.constexpr, sum_layout: gl.constexpr,
):  # fmt: skip
    """The three sums after these pairs, of which those count that are NEAR to FAR apart; row r is OFFSET + r - c from key c.

    PART queries at a time: fewer take fewer registers. `zero` is 0, and keeps the masks from being made before the loop.
    QUERIES_NEW, KEYS_NEW: there is nothing yet in the sums of the queries, of the keys.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    zeros = gl.zeros([64, PART], gl.float32, layout)
    for part in gl.static_range(64 // PART):
        query, gradient = q_tile.slice(part * PART, PART), gradient_tile.slice(part * PART, PART)
        scores = warpgroup_mma(keys, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        weight_slopes = warpgroup_mma(values, gradient.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, weight_slopes = warpgroup_mma_wait(0, deps=(scores, weight_slopes))
        total = totals.slice(part * PART, PART).load(gl.SliceLayout(0, layout))
        weights = gl.exp2(scores * scale - total[None, :])
        key = zero + gl.arange(0, 64, gl.SliceLayout(1, layout))
        row = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
        if OFFSET - 63 < NEAR:
            weights = gl.where(key[:, None] <= row[None, :] + (OFFSET - NEAR), weights, 0.0)
        if OFFSET + 63 > FAR:
            weights = gl.where(key[:, None] >= row[None, :] + (OFFSET - FAR), weights, 0.0)
        weight_operand = gl.convert_layout(weights.to(query.dtype), operand_layout)
        dv_sum = warpgroup_mma(weight_operand, gradient, dv_sum, use_acc=part > 0 or not KEYS_NEW, is_async=True)
        mean = means.slice(part * PART, PART).load(gl.SliceLayout(0, layout))
        slopes = (weights * (weight_slopes - mean[None, :])).to(query.dtype)
        slopes_tile.slice(part * PART, PART).permute((1, 0)).store(slopes)
        slope_operand = gl.convert_layout(slopes, operand_layout)
        dk_sum = warpgroup_mma(slope_operand, query, dk_sum, use_acc=part > 0 or not KEYS_NEW, is_async=True)
        if part + 1 < 64 // PART:
            dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dk_sum, dv_sum))
    fence_async_shared()
    dq_sum = warpgroup_mma(slopes_tile, keys, dq_sum, use_acc=not QUERIES_NEW, is_async=True)
    dq_sum, dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dq_sum, dk_sum, dv_sum))
    return dq_sum, dk_sum, dv_sum
