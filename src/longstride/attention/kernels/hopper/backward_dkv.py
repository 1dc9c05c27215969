"""hopper_dkv: the gradients of keys and values, as in backward.py, with Hopper's copy engine and asynchronous products.

Two groups of four warps have 64 keys of a tile each and hold both gradients in registers, while one warp copies the queries
that see these keys, and the output's gradient, into shared memory. Pairs lie keys down and queries across: weights
and slopes then go from registers straight into the products that sum them.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper.ring import beside, item_of_round, make_ring, rounds

TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Keys of a tile, and of one consumer."""
QUERIES = gl.constexpr(64)
ALIGNED = gl.constexpr(4)
"""The copy engine reads from multiples of 16 bytes on: four of the numbers of queries."""
STAGES = gl.constexpr(3)


@gluon.jit
def place_keys(item, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, CELLS: gl.constexpr):
    """batch and head of an item, its first key, its lane and the lane's length, and the queries [first, end) that see it.

    Rows and keys count along the lane; for cells the lane is the whole sequence, and keys are numbered. The first query is
    where the copy engine can begin, and may not see them yet.
    """
    head = item % all_heads
    tile = item // all_heads
    if CELLS > 0:
        first_key = tile * TILE
        lane = 0
        length = n
        first = (first_key // in_lane + 1) * lane_shift // ALIGNED * ALIGNED
        end = n
    else:
        first_key = tile // lanes * TILE
        lane = tile % lanes
        length = gl.minimum(limit, (n - 1 - lane * lane_shift) // step + 1)
        first = (first_key + near) // ALIGNED * ALIGNED
        # A tile past the end of a short lane still takes one turn, in which nothing is seen.
        end = gl.maximum(first + 1, gl.minimum(length, first_key + TILE + far))
    return head // heads, head % heads, first_key, lane, length, first, end


@gluon.jit
def copy_tiles(
    q_view, k_view, v_view, slopes_view, numbers_view, keys, values, queries, slopes, numbers, items, all_heads, heads,
    lanes, lane_shift, step, row_shift, inner_shift, number_shift, in_lane, limit, near, far, n, first_cell,
    CELLS: gl.constexpr,
):  # fmt: skip
    """The producer."""
    count = 0
    for turn in range(rounds(items)):
        item = item_of_round(turn)
        batch, head, first_key, lane, _, first, end = place_keys(
            item, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, CELLS
        )
        row_start, inner = lane * row_shift, lane * inner_shift
        keys.begin(turn, keys.bytes + values.bytes)
        if CELLS > 0:
            block = first_key // CELLS
            inside = gl.load(first_cell + head) + first_key % CELLS
            keys.copy(turn, k_view, [batch, head, block, inside, 0])
            values.copy(turn, v_view, [batch, head, block, inside, 0])
        else:
            keys.copy(turn, k_view, [batch, head, row_start + first_key, inner, 0])
            values.copy(turn, v_view, [batch, head, row_start + first_key, inner, 0])
        for start in range(first, end, QUERIES):
            queries.begin(count, queries.bytes + slopes.bytes + numbers.bytes)
            queries.copy(count, q_view, [batch, head, row_start + start, inner, 0])
            numbers.copy(count, numbers_view, [batch * heads + head, 0, lane * number_shift + start])
            slopes.copy(count, slopes_view, [batch, head, row_start + start, inner, 0])
            count += 1


@gluon.jit
def store_sum(total, matrix, batch, head, stride_batch, stride_head, position, there, stride_row, D: gl.constexpr,
              LATER: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    WIDTH: gl.constexpr = total.shape[1]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = matrix + batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head
    place = place + position.to(gl.int64)[:, None] * stride_row + column[None, :]
    mask = there[:, None] & (column < D)[None, :]
    result = gl.convert_layout(total, layout)
    if LATER:
        result += gl.load(place, mask=mask, other=0.0).to(gl.float32)
    gl.store(place, result.to(matrix.dtype.element_ty), mask=mask)


@gluon.jit
def number_row(tile, index: gl.constexpr, layout: gl.constexpr):
    """A row of a tile of numbers, one for each query across."""
    rows = tile._reinterpret(gl.float32, tile.shape, gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return rows.index(index).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def weigh(scores, numbers, scale, start, least, most, unmasked_from, unmasked_until):
    """The weights of a tile's pairs: 0 where the key's queries, from `least` to `most`, do not include one."""
    layout: gl.constexpr = scores.type.layout
    weights = gl.exp2(scores * scale - number_row(numbers, 0, layout))
    if (start < unmasked_from) | (start + QUERIES - 1 > unmasked_until):
        row = start + gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
        weights = gl.where((row[None, :] >= least[:, None]) & (row[None, :] <= most[:, None]), weights, 0.0)
    return weights


@gluon.jit
def slope_pairs(
    weights, weight_slopes, numbers, weight_layout: gl.constexpr, slope_layout: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """Weights and the slopes of the scores, as operands of the products that sum them."""
    layout: gl.constexpr = weights.type.layout
    score_slopes = weights * (weight_slopes - number_row(numbers, 1, layout))
    return gl.convert_layout(weights.to(dtype), weight_layout), gl.convert_layout(score_slopes.to(dtype), slope_layout)


@gluon.jit
def sum_tiles(
    half: gl.constexpr, keys, values, queries, slopes, numbers, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    items, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, key_count, block_length, first_cell,
    scale, slope_scale, D_QK: gl.constexpr, D_V: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr,
    LATER: gl.constexpr,
):  # fmt: skip
    """A consumer, for one half of a tile's keys."""
    dtype: gl.constexpr = queries.tiles.dtype
    WIDTH_QK: gl.constexpr = queries.tiles.shape[2]
    WIDTH_V: gl.constexpr = slopes.tiles.shape[2]
    pair_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_QK, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    key_operand: gl.constexpr = gl.DotOperandLayout(0, pair_layout, 2)
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    zeros = gl.zeros([HALF, QUERIES], gl.float32, pair_layout)
    count = 0
    for turn in range(rounds(items)):
        item = item_of_round(turn)
        batch, head, first_key, lane, length, first, end = place_keys(
            item, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, CELLS
        )
        key_column = first_key + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, pair_layout))
        if CELLS > 0:
            least = (key_column // in_lane + 1) * lane_shift
            most = key_column * 0 + n
            unmasked_from = ((first_key + half * HALF + HALF - 1) // in_lane + 1) * lane_shift
            unmasked_until = n
        else:
            least = key_column + near
            most = gl.minimum(key_column + far, length - 1)
            unmasked_from = first_key + half * HALF + HALF - 1 + near
            unmasked_until = gl.minimum(first_key + half * HALF + far, length - 1)
            if not OWN:
                # Of the own block only the cells are seen: the others' queries begin past the end.
                inside = gl.load(first_cell + head)
                least = gl.where((key_column >= inside) & (key_column < inside + in_lane), least, length)
                unmasked_from = length
        dk_sum = gl.zeros([HALF, WIDTH_QK], gl.float32, dk_layout)
        dv_sum = gl.zeros([HALF, WIDTH_V], gl.float32, dv_layout)
        key = keys.wait_full(turn).slice(half * HALF, HALF).load(key_operand)
        value = values.tile(turn).slice(half * HALF, HALF).load(key_operand)
        keys.release(turn)
        query = queries.wait_full(count)
        scoring = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        sloping = warpgroup_mma(value, slopes.tile(count).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scoring,))
        weights = weigh(
            scores, numbers.tile(count), scale, first, least, most, unmasked_from, unmasked_until
        )  # fmt: skip
        weight_slopes = warpgroup_mma_wait(0, deps=(sloping,))
        weight_operand, slope_operand = slope_pairs(
            weights, weight_slopes, numbers.tile(count), dv_operand, dk_operand, dtype
        )
        for start in range(first + QUERIES, end, QUERIES):
            query = queries.wait_full(count + 1)
            scoring = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
            adding_v = warpgroup_mma(weight_operand, slopes.tile(count), dv_sum, is_async=True)
            adding_k = warpgroup_mma(slope_operand, queries.tile(count), dk_sum, is_async=True)
            sloping = warpgroup_mma(value, slopes.tile(count + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(3, deps=(scoring,))
            weights = weigh(
                scores, numbers.tile(count + 1), scale, start, least, most, unmasked_from, unmasked_until
            )  # fmt: skip
            dv_sum, dk_sum, weight_slopes = warpgroup_mma_wait(0, deps=(adding_v, adding_k, sloping))
            queries.release(count)
            count += 1
            weight_operand, slope_operand = slope_pairs(
                weights, weight_slopes, numbers.tile(count), dv_operand, dk_operand, dtype
            )  # fmt: skip
        adding_v = warpgroup_mma(weight_operand, slopes.tile(count), dv_sum, is_async=True)
        adding_k = warpgroup_mma(slope_operand, queries.tile(count), dk_sum, is_async=True)
        dv_sum, dk_sum = warpgroup_mma_wait(0, deps=(adding_v, adding_k))
        queries.release(count)
        count += 1

        k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH_QK, WIDTH_QK // 8], [4, 1], [1, 0])
        v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH_V, WIDTH_V // 8], [4, 1], [1, 0])
        k_place = first_key + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, k_layout))
        v_place = first_key + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, v_layout))
        k_there = k_place < key_count
        v_there = v_place < key_count
        if CELLS > 0:
            inside = gl.load(first_cell + head)
            k_place = k_place // CELLS * block_length + inside + k_place % CELLS
            v_place = v_place // CELLS * block_length + inside + v_place % CELLS
        else:
            k_there = k_place < length
            v_there = v_place < length
            k_place = lane * lane_shift + k_place * step
            v_place = lane * lane_shift + v_place * step
        store_sum(
            dk_sum * slope_scale, dk, batch, head, dk_batch, dk_head, k_place, k_there, dk_row, D_QK, LATER, k_layout
        )  # fmt: skip
        store_sum(dv_sum, dv, batch, head, dv_batch, dv_head, v_place, v_there, dv_row, D_V, LATER, v_layout)


@gluon.jit
def hopper_dkv(
    q_view, k_view, v_view, slopes_view, numbers_view, dk, dv, first_cell, dk_batch, dk_head, dk_row, dv_batch, dv_head,
    dv_row, items, all_heads, heads, lanes, lane_shift, step, row_shift, inner_shift, number_shift, in_lane, limit, near,
    far, n, key_count, block_length, scale, slope_scale,
    D_QK: gl.constexpr, D_V: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_view.dtype
    keys = make_ring(dtype, 2, TILE, k_view.block_type.shape[4], 2)
    values = beside(keys, dtype, TILE, v_view.block_type.shape[4])
    queries = make_ring(dtype, STAGES, QUERIES, q_view.block_type.shape[4], 2)
    slopes = beside(queries, dtype, QUERIES, slopes_view.block_type.shape[4])
    numbers = beside(queries, gl.float32, 2, QUERIES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_tiles, (
                gl.constexpr(0), keys, values, queries, slopes, numbers, dk, dv, dk_batch, dk_head, dk_row, dv_batch,
                dv_head, dv_row, items, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, key_count,
                block_length, first_cell, scale, slope_scale, D_QK, D_V, CELLS, OWN, LATER,
            )),
            (sum_tiles, (
                gl.constexpr(1), keys, values, queries, slopes, numbers, dk, dv, dk_batch, dk_head, dk_row, dv_batch,
                dv_head, dv_row, items, all_heads, heads, lanes, lane_shift, step, in_lane, limit, near, far, n, key_count,
                block_length, first_cell, scale, slope_scale, D_QK, D_V, CELLS, OWN, LATER,
            )),
            (copy_tiles, (
                q_view, k_view, v_view, slopes_view, numbers_view, keys, values, queries, slopes, numbers, items, all_heads,
                heads, lanes, lane_shift, step, row_shift, inner_shift, number_shift, in_lane, limit, near, far, n,
                first_cell, CELLS,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip
