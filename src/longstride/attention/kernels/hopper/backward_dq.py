"""hopper_dq: the gradient of queries, as in backward.py, with Hopper's copy engine and asynchronous products.

The tiles, and who copies and computes what, are those of window_forward.py. A consumer has 64 queries, and keeps them and
the output's gradient in registers; while it does the arithmetic of 64 keys, the products for the next 64 are under way.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper.ring import beside, item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, TILE, first_key, hide, key_tiles, locate

HALF = gl.constexpr(64)
"""Keys that are computed together: half a tile, so that the products of the next half have registers, too."""
STAGES = gl.constexpr(3)


@gluon.jit
def copy_tiles(
    q_view, slopes_view, k_view, v_view, k_cells, v_cells, queries, slopes, keys, values, items, all_heads, heads, lanes,
    along, row_shift, inner_shift, in_lane, near, far, limit, first_cell, CELLS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer."""
    count = 0
    for turn in range(rounds(items)):
        batch, head, lane, first_row = locate(item_of_round(turn), all_heads, heads, lanes, along)
        cell_tiles, first_tile, window = key_tiles(lane, first_row, in_lane, near, far, limit, WINDOW)
        row = lane * row_shift + first_row
        queries.begin(turn, queries.bytes + slopes.bytes)
        queries.copy(turn, q_view, [batch, head, row, lane * inner_shift, 0])
        slopes.copy(turn, slopes_view, [batch, head, row, lane * inner_shift, 0])
        if CELLS > 0:
            inside = gl.load(first_cell + head)
            for tile in range(cell_tiles):
                block = tile * TILE // CELLS
                offset = inside + tile * TILE % CELLS
                keys.begin(count, keys.bytes + values.bytes)
                keys.copy(count, k_cells, [batch, head, block, offset, 0])
                values.copy(count, v_cells, [batch, head, block, offset, 0])
                count += 1
        for tile in range(window):
            row = lane * row_shift + (first_tile + tile) * TILE
            keys.begin(count, keys.bytes + values.bytes)
            keys.copy(count, k_view, [batch, head, row, lane * inner_shift, 0])
            values.copy(count, v_view, [batch, head, row, lane * inner_shift, 0])
            count += 1


@gluon.jit
def begin_pairs(query, slope, key, value, offset: gl.constexpr):
    """Begins the scores of a half of a tile's pairs, and the slopes of their weights."""
    layout: gl.constexpr = query.type.layout.parent
    zeros = gl.zeros([ROWS, HALF], gl.float32, layout)
    key = key.slice(offset, HALF).permute((1, 0))
    value = value.slice(offset, HALF).permute((1, 0))
    scoring = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
    sloping = warpgroup_mma(slope, value, zeros, use_acc=False, is_async=True)
    return scoring, sloping


@gluon.jit
def slope_pairs(
    scores, weight_slopes, start, is_cell, before, first_row, near, far, inside, own_cells, log_sum_exp, mean, scale,
    dtype: gl.constexpr, layout: gl.constexpr, OWN: gl.constexpr, CELLS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The slopes of the scores, as an operand."""
    if MASKED:
        scores = hide(scores, start, is_cell, before, first_row, near, far, inside, own_cells, OWN, CELLS, False)
    weights = gl.exp2(scores * scale - log_sum_exp[:, None])
    return gl.convert_layout((weights * (weight_slopes - mean[:, None])).to(dtype), layout)


@gluon.jit
def add_pairs(
    scores, weight_slopes, total, query, slope, next_key, next_value, next_offset: gl.constexpr, key, offset: gl.constexpr,
    start, is_cell, before, first_row, near, far, inside, own_cells, log_sum_exp, mean, scale, OWN: gl.constexpr,
    CELLS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds half a tile's pairs, whose products are there; those of the next half are computed meanwhile and returned."""
    sum_layout: gl.constexpr = total.type.layout
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    dtype: gl.constexpr = query.dtype
    scoring, sloping = begin_pairs(query, slope, next_key, next_value, next_offset)
    operand = slope_pairs(
        scores, weight_slopes, start, is_cell, before, first_row, near, far, inside, own_cells, log_sum_exp, mean, scale,
        dtype, operand_layout, OWN, CELLS, MASKED,
    )  # fmt: skip
    adding = warpgroup_mma(operand, key.slice(offset, HALF), total, is_async=True)
    next_scores, next_slopes = warpgroup_mma_wait(1, deps=(scoring, sloping))
    total = warpgroup_mma_wait(0, deps=(adding,))
    return next_scores, next_slopes, total


@gluon.jit
def sum_tiles(
    half: gl.constexpr, queries, slopes, keys, values, numbers, dq, dq_batch, dq_head, dq_row, items, all_heads, heads,
    lanes, along, lane_shift, step, in_lane, near, far, limit, n, padded, number_shift, first_cell, own_cells,
    scale, slope_scale,
    D_QK: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr, WINDOW: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """A consumer, for one half of a tile's rows."""
    dtype: gl.constexpr = keys.tiles.dtype
    WIDTH_QK: gl.constexpr = keys.tiles.shape[2]
    pair_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    query_layout: gl.constexpr = gl.DotOperandLayout(0, pair_layout, 2)
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_QK, 16])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH_QK, WIDTH_QK // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, pair_layout)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    count = 0
    for turn in range(rounds(items)):
        batch, head, lane, tile_row = locate(item_of_round(turn), all_heads, heads, lanes, along)
        cell_tiles, first_tile, window = key_tiles(lane, tile_row, in_lane, near, far, limit, WINDOW)
        before = lane * in_lane
        first_row = tile_row + half * ROWS
        inside = 0
        if not OWN:
            inside = gl.load(first_cell + head)
        lane_start = lane * lane_shift
        length = gl.minimum(limit, (n - 1 - lane_start) // step + 1)
        row = first_row + gl.arange(0, ROWS, row_layout)
        there = row < length
        numbers_of_lane = numbers + (batch * heads + head).to(gl.int64) * 2 * padded + lane * number_shift
        log_sum_exp = gl.load(numbers_of_lane + row, mask=there, other=0.0)
        mean = gl.load(numbers_of_lane + padded + row, mask=there, other=0.0)

        total = gl.zeros([ROWS, WIDTH_QK], gl.float32, sum_layout)
        query = queries.wait_full(turn).slice(half * ROWS, ROWS).load(query_layout)
        slope = slopes.tile(turn).slice(half * ROWS, ROWS).load(query_layout)
        queries.release(turn)
        pairs = begin_pairs(query, slope, keys.wait_full(count), values.tile(count), 0)
        scores, weight_slopes = warpgroup_mma_wait(0, deps=pairs)
        tiles = cell_tiles + window
        # Of cells alone, none but the last tile has any that are hidden.
        for tile in range(tiles - 1):
            start = first_key(tile, cell_tiles, first_tile)
            scores, weight_slopes, total = add_pairs(
                scores, weight_slopes, total, query, slope, keys.tile(count), values.tile(count), HALF, keys.tile(count), 0,
                start, tile < cell_tiles, before, first_row, near, far, inside, own_cells, log_sum_exp, mean, scale, OWN,
                CELLS, WINDOW,
            )  # fmt: skip
            scores, weight_slopes, total = add_pairs(
                scores, weight_slopes, total, query, slope, keys.wait_full(count + 1), values.tile(count + 1), 0,
                keys.tile(count), HALF, start + HALF, tile < cell_tiles, before, first_row, near, far, inside, own_cells,
                log_sum_exp, mean, scale, OWN, CELLS, WINDOW,
            )  # fmt: skip
            keys.release(count)
            count += 1
        start = first_key(tiles - 1, cell_tiles, first_tile)
        is_cell = tiles <= cell_tiles
        scores, weight_slopes, total = add_pairs(
            scores, weight_slopes, total, query, slope, keys.tile(count), values.tile(count), HALF, keys.tile(count), 0,
            start, is_cell, before, first_row, near, far, inside, own_cells, log_sum_exp, mean, scale, OWN, CELLS,
            True,
        )  # fmt: skip
        operand = slope_pairs(
            scores, weight_slopes, start + HALF, is_cell, before, first_row, near, far, inside, own_cells, log_sum_exp, mean,
            scale, dtype, operand_layout, OWN, CELLS, True,
        )  # fmt: skip
        adding = warpgroup_mma(operand, keys.tile(count).slice(HALF, HALF), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(adding,))
        keys.release(count)
        count += 1

        result = gl.convert_layout(total, store_layout)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, WIDTH_QK, gl.SliceLayout(0, store_layout))
        place = dq + batch.to(gl.int64) * dq_batch + head.to(gl.int64) * dq_head
        place = place + (lane_start + row * step).to(gl.int64)[:, None] * dq_row + column[None, :]
        mask = (row < length)[:, None] & (column < D_QK)[None, :]
        result *= slope_scale
        if LATER:
            result += gl.load(place, mask=mask, other=0.0).to(gl.float32)
        gl.store(place, result.to(dtype), mask=mask)


@gluon.jit
def hopper_dq(
    q_view, slopes_view, k_view, v_view, k_cells, v_cells, numbers, dq, first_cell, dq_batch, dq_head, dq_row, items,
    all_heads, heads, lanes, along, lane_shift, step, row_shift, inner_shift, in_lane, near, far, limit, n, padded,
    number_shift, own_cells, scale, slope_scale,
    D_QK: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr, WINDOW: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_view.dtype
    queries = make_ring(dtype, 2, TILE, q_view.block_type.shape[4], 2)
    slopes = beside(queries, dtype, TILE, slopes_view.block_type.shape[4])
    keys = make_ring(dtype, STAGES, TILE, k_view.block_type.shape[4], 2)
    values = beside(keys, dtype, TILE, v_view.block_type.shape[4])
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_tiles, (
                gl.constexpr(0), queries, slopes, keys, values, numbers, dq, dq_batch, dq_head, dq_row, items, all_heads,
                heads, lanes, along, lane_shift, step, in_lane, near, far, limit, n, padded, number_shift, first_cell,
                own_cells, scale, slope_scale, D_QK, CELLS, OWN, WINDOW, LATER,
            )),
            (sum_tiles, (
                gl.constexpr(1), queries, slopes, keys, values, numbers, dq, dq_batch, dq_head, dq_row, items, all_heads,
                heads, lanes, along, lane_shift, step, in_lane, near, far, limit, n, padded, number_shift, first_cell,
                own_cells, scale, slope_scale, D_QK, CELLS, OWN, WINDOW, LATER,
            )),
            (copy_tiles, (
                q_view, slopes_view, k_view, v_view, k_cells, v_cells, queries, slopes, keys, values, items, all_heads,
                heads, lanes, along, row_shift, inner_shift, in_lane, near, far, limit, first_cell, CELLS, WINDOW,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip
