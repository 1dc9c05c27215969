"""window_forward: a window of the own lane, one pattern in all heads, with Hopper's copy engine and asynchronous products.

One warp copies tiles of keys and values into shared memory. Groups of four warps have 64 queries each. While a group takes
the softmax of one tile, its product of the queries with the next tile's keys is under way, and while one group does
arithmetic, the other has the matrix unit.
Programs are persistent: the next queries are loaded while results are written.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper.ring import item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, TILE, hide, key_tiles, locate, take_softmax
from longstride.attention.kernels.primitives import LOWEST

STAGES = gl.constexpr(4)


@gluon.jit
def copy_tiles(
    q_view, k_view, v_view, queries, keys, values, items, all_heads, heads, lanes, along, row_shift, inner_shift, near, far,
    limit,
):  # fmt: skip
    """The producer."""
    count = 0
    for turn in range(rounds(items)):
        batch, head, lane, first_row = locate(item_of_round(turn), all_heads, heads, lanes, along)
        _, first_tile, total = key_tiles(lane, first_row, 0, near, far, limit, True)
        for group in gl.static_range(2):
            row = lane * row_shift + first_row + group * ROWS
            queries.fill(2 * turn + group, q_view, [batch, head, row, lane * inner_shift, 0])
        for tile in range(total):
            row = lane * row_shift + (first_tile + tile) * TILE
            keys.fill(count, k_view, [batch, head, row, lane * inner_shift, 0])
            values.fill(count, v_view, [batch, head, row, lane * inner_shift, 0])
            count += 1


@gluon.jit
def compute_tile(
    scores, running_max, weight, sums, query, keys, values, count, tile, first_row, near, far, scale,
):  # fmt: skip
    """A tile whose scores are there; the next tile's are computed meanwhile and returned."""
    score_layout: gl.constexpr = scores.type.layout
    sum_layout: gl.constexpr = sums.type.layout
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    zeros = gl.zeros([ROWS, TILE], gl.float32, score_layout)
    key = keys.wait_full(count + 1)
    scoring = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = hide(scores, tile * TILE, False, 0, first_row, near, far, 0, 0, True, 0, False)
    weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout))[:, None]
    operand = gl.convert_layout(weights.to(values.tiles.dtype), weight_layout)
    adding = warpgroup_mma(operand, values.wait_full(count), sums, is_async=True)
    following = warpgroup_mma_wait(1, deps=(scoring,))
    keys.release(count + 1)
    sums = warpgroup_mma_wait(0, deps=(adding,))
    values.release(count)
    return following, running_max, weight, sums


@gluon.jit
def compute_tiles(
    group: gl.constexpr, queries, keys, values, output, log_sum_exp, output_batch, output_head, output_row, items, all_heads,
    heads, lanes, along, lane_shift, step, near, far, limit, n, scale, D_V: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """A group, for its 64 rows of an item."""
    dtype: gl.constexpr = values.tiles.dtype
    WIDTH_V: gl.constexpr = values.tiles.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH_V, WIDTH_V // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    zeros = gl.zeros([ROWS, TILE], gl.float32, score_layout)
    count = 0
    for turn in range(rounds(items)):
        batch, head, lane, first_row = locate(item_of_round(turn), all_heads, heads, lanes, along)
        _, first_tile, total = key_tiles(lane, first_row, 0, near, far, limit, True)
        first_row += group * ROWS
        lane_start = lane * lane_shift
        length = gl.minimum(limit, (n - 1 - lane_start) // step + 1)
        result = output + batch.to(gl.int64) * output_batch + head.to(gl.int64) * output_head
        totals = log_sum_exp + (batch * heads + head).to(gl.int64) * n

        by_score = first_row + gl.arange(0, ROWS, row_layout)
        running_max = gl.full([ROWS], LOWEST, gl.float32, row_layout)
        weight = gl.zeros([ROWS], gl.float32, row_layout)
        sums = gl.zeros([ROWS, WIDTH_V], gl.float32, sum_layout)
        if LATER:
            by_sum = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, sum_layout))
            column = gl.arange(0, WIDTH_V, gl.SliceLayout(0, sum_layout))
            place = (lane_start + by_sum * step).to(gl.int64)[:, None] * output_row + column[None, :]
            there = (by_sum < length)[:, None] & (column < D_V)[None, :]
            earlier = gl.load(totals + lane_start + by_score * step, mask=by_score < length, other=float("-inf"))
            weight = gl.where(earlier == float("-inf"), 0.0, 1.0)
            running_max = gl.where(earlier == float("-inf"), LOWEST, earlier)
            sums = gl.load(result + place, mask=there, other=0.0).to(gl.float32)

        query = queries.wait_full(2 * turn + group)
        scoring = warpgroup_mma(query, keys.wait_full(count).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scoring,))
        keys.release(count)
        for tile in range(first_tile, first_tile + total - 1):
            scores, running_max, weight, sums = compute_tile(
                scores, running_max, weight, sums, query, keys, values, count, tile, first_row, near, far, scale
            )  # fmt: skip
            count += 1
        # The last tile has no next one whose product could be under way, and most often pairs to hide.
        queries.release(2 * turn + group)
        start = (first_tile + total - 1) * TILE
        scores = hide(scores, start, False, 0, first_row, near, far, 0, 0, True, 0, True)
        weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout))[:, None]
        operand = gl.convert_layout(weights.to(dtype), weight_layout)
        adding = warpgroup_mma(operand, values.wait_full(count), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(adding,))
        values.release(count)
        count += 1

        nothing = weight == 0
        weight = gl.where(nothing, 1.0, weight)
        final = sums / gl.convert_layout(weight, gl.SliceLayout(1, sum_layout))[:, None]
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, WIDTH_V, gl.SliceLayout(0, store_layout))
        place = (lane_start + row * step).to(gl.int64)[:, None] * output_row + column[None, :]
        there = (row < length)[:, None] & (column < D_V)[None, :]
        gl.store(result + place, gl.convert_layout(final.to(dtype), store_layout), mask=there)
        bits = gl.where(nothing, float("-inf"), running_max + gl.log2(weight))
        gl.store(totals + lane_start + by_score * step, bits, mask=by_score < length)


@gluon.jit
def window_forward(
    q_view, k_view, v_view, output, log_sum_exp, output_batch, output_head, output_row, items, all_heads, heads, lanes,
    along, lane_shift, step, row_shift, inner_shift, near, far, limit, n, scale,
    D_V: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_view.dtype
    queries = make_ring(dtype, 4, ROWS, q_view.block_type.shape[4], 1)
    keys = make_ring(dtype, STAGES, TILE, k_view.block_type.shape[4], 2)
    values = make_ring(dtype, STAGES, TILE, v_view.block_type.shape[4], 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_tiles, (
                gl.constexpr(0), queries, keys, values, output, log_sum_exp, output_batch, output_head, output_row, items,
                all_heads, heads, lanes, along, lane_shift, step, near, far, limit, n, scale, D_V, LATER,
            )),
            (compute_tiles, (
                gl.constexpr(1), queries, keys, values, output, log_sum_exp, output_batch, output_head, output_row, items,
                all_heads, heads, lanes, along, lane_shift, step, near, far, limit, n, scale, D_V, LATER,
            )),
            (copy_tiles, (
                q_view, k_view, v_view, queries, keys, values, items, all_heads, heads, lanes, along, row_shift, inner_shift,
                near, far, limit,
            )),
        ],
        [4, 1],  # warps of the second group and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip
