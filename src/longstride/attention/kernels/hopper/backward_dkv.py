"""hopper_dkv: the gradients of keys and values, as in backward.py, with TMA copies and asynchronous products.

Each of two warpgroups has 64 keys of a tile and holds both gradients in registers, while one warp copies the queries that
see these keys, with the output's gradient, into shared memory. Pairs lie keys down and queries across: weights and the
gradients of scores then go from registers straight into the products that sum them. The keys and values themselves are in
registers, too, or in shared memory if values have two panels.

A long sequence with few heads has few tiles of summary cells, and nearly all queries see the first of them. Several items
then share the queries of a tile: each writes its part of the sums, in float32, and `backward_sum_parts` adds these in order.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper import lane_tiles, tiles
from longstride.attention.kernels.hopper.ring import beside, fill_both, item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, TILE
from longstride.attention.kernels.primitives import cell_position, is_summary_cell

ALIGNED = gl.constexpr(4)
"""TMA copies start at multiples of 16 bytes: four float32 of the row stats."""
STAGES = gl.constexpr(3)


class Seen(NamedTuple):
    """The queries that see the keys of a warpgroup, as rows of the lane."""

    first: Any  # for each key
    last: Any
    all_from: Any  # Rows between these see all the keys.
    all_until: Any


@gluon.jit
def place_keys(item, job, work, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """batch and head of an item, its first key, its lane and the lane's length, and the queries [first, end) that see it.

    Rows and keys are indices in the lane; for cells the lane is the whole sequence, and keys are indices among the cells.
    The first query is aligned for TMA, and may not see the keys yet.
    """
    head = item % work.all_heads
    tile = item // work.all_heads
    if SPLIT:
        tile //= work.splits
    if KEYS.cells > 0:
        first_key = tile * TILE
        lane = 0
        length = work.n
        first = (first_key // job.cells + 1) * job.lane_stride // ALIGNED * ALIGNED
        end = work.n
        if SPLIT:
            share = ((end - first + ROWS - 1) // ROWS + work.splits - 1) // work.splits * ROWS
            first += item // work.all_heads % work.splits * share
            # An item without queries takes one turn past the end, where TMA reads zeros.
            end = gl.maximum(first + 1, gl.minimum(end, first + share))
    else:
        first_key = tile % work.tiles * TILE
        lane = tile // work.tiles
        length = tiles.lane_length(lane, job, work.n)
        first = (first_key + job.near) // ALIGNED * ALIGNED
        # A tile past the end of a short lane still takes one turn, in which nothing is seen.
        end = gl.maximum(first + 1, gl.minimum(length, first_key + TILE + job.far))
    return head // work.heads, head % work.heads, first_key, lane, length, first, end


@gluon.jit
def copy_for_dkv(sources, rings, job, work, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The producer warp."""
    q, k, v, d_output, row_stats = sources
    keys, values, queries, d_outputs, stats = rings
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, first_key, lane, _, first, end = place_keys(item_of_round(turn), job, work, KEYS, SPLIT)
        if KEYS.cells > 0:
            first_cell = gl.load(work.first_cells + head)
            fill_both(keys, values, turn, k, v, tiles.cell_coordinates(batch, head, first_key, first_cell, KEYS))
        else:
            fill_both(keys, values, turn, k, v, tiles.lane_coordinates(batch, head, lane, first_key, work))
        for start in range(first, end, ROWS):
            place = tiles.lane_coordinates(batch, head, lane, start, work)
            queries.begin(count, queries.bytes + d_outputs.bytes + stats.bytes)
            queries.copy(count, q, place)
            stats.copy(count, row_stats, [batch * work.heads + head, 0, lane * work.stats_shift + start])
            d_outputs.copy(count, d_output, place)
            count += 1


@gluon.jit
def stats_row(stats, index: gl.constexpr, layout: gl.constexpr):
    """The lse (0) or delta (1) of a tile's queries, across."""
    rows = stats._reinterpret(gl.float32, stats.shape, gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return rows.index(index).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def weigh_seen(scores, stats, start, seen, scale):
    """The weights of a tile's pairs: 0 where the query does not see the key."""
    layout: gl.constexpr = scores.type.layout
    weights = gl.exp2(scores * scale - stats_row(stats, 0, layout))
    if (start < seen.all_from) | (start + ROWS - 1 > seen.all_until):
        row = start + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        weights = gl.where((row[None, :] >= seen.first[:, None]) & (row[None, :] <= seen.last[:, None]), weights, 0.0)
    return weights


@gluon.jit
def as_operands(weights, d_weights, stats, dtype: gl.constexpr, dv_layout: gl.constexpr, dk_layout: gl.constexpr):
    """Weights and the gradients of the scores, as operands of the products that sum them."""
    layout: gl.constexpr = weights.type.layout
    d_scores = weights * (d_weights - stats_row(stats, 1, layout))
    weights = gl.convert_layout(weights.to(dtype), tiles.operand_layout(dv_layout))
    return weights, gl.convert_layout(d_scores.to(dtype), tiles.operand_layout(dk_layout))


@gluon.jit
def seen_by(first_key, head, length, job, work, layout: gl.constexpr, KEYS: gl.constexpr):
    """The queries that see the ROWS keys from `first_key` on."""
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if KEYS.cells > 0:
        first = (key // job.cells + 1) * job.lane_stride
        last = key * 0 + work.n
        all_from = ((first_key + ROWS - 1) // job.cells + 1) * job.lane_stride
        all_until = work.n
    else:
        first = key + job.near
        last = gl.minimum(key + job.far, length - 1)
        all_from = first_key + ROWS - 1 + job.near
        all_until = gl.minimum(first_key + job.far, length - 1)
        if not KEYS.own:
            # Of the own block only the cells are seen: the others' queries begin past the end.
            first_cell = gl.load(work.first_cells + head)
            first = gl.where(is_summary_cell(key, job.cells, first_cell), first, length)
            all_from = length
    return Seen(first, last, all_from, all_until)


@gluon.jit
def store_keys(
    total, matrix, item, place, first_cell, job, work,
    D: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ACCUMULATE: gl.constexpr, PANEL: gl.constexpr = 0,
):  # fmt: skip
    """Writes a gradient of the ROWS keys at a place. SPLIT: the item's part, beside the other parts."""
    batch, head, first_key, lane, length = place
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, tiles.row_layout(total.shape[1])))
    if KEYS.cells > 0:
        valid = key < (job.lanes - 1) * KEYS.cells
        if SPLIT:
            position = key * work.splits + item // work.all_heads % work.splits
        else:
            position = cell_position(key, KEYS.cells, job.block, first_cell)
    else:
        valid = key < length
        position = lane * job.lane_stride + key * job.index_stride
    tiles.store_gradient(total, matrix, batch, head, position, valid, D, ACCUMULATE, PANEL)


@gluon.jit
def compute_dkv(
    half: gl.constexpr, rings, dk, dv, job, work, scales,
    D_QK: gl.constexpr, D_V: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup, for one half of a tile's keys."""
    keys, values, queries, d_outputs, stats = rings
    dtype: gl.constexpr = queries.tiles.dtype
    pair_layout: gl.constexpr = tiles.mma_layout(ROWS)
    WIDTH_QK: gl.constexpr = queries.tiles.shape[2]
    WIDTH_V: gl.constexpr = d_outputs.tiles.shape[2]
    dk_layout: gl.constexpr = tiles.mma_layout(WIDTH_QK)
    dv_layout: gl.constexpr = tiles.mma_layout(WIDTH_V)
    key_layout: gl.constexpr = tiles.operand_layout(pair_layout)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, pair_layout)
    count = 0
    for turn in range(rounds(work.items)):
        item = item_of_round(turn)
        batch, head, first_key, lane, length, first, end = place_keys(item, job, work, KEYS, SPLIT)
        # The first queries in the lane come before all keys of the second warpgroup.
        if half == 1 and KEYS.cells == 0 and first + ROWS < end:
            queries.wait_full(count)
            queries.release(count)
            count += 1
            first += ROWS
        first_key += half * ROWS
        seen = seen_by(first_key, head, length, job, work, pair_layout, KEYS)
        dk_sum = gl.zeros([ROWS, WIDTH_QK], gl.float32, dk_layout)
        dv_sum = lane_tiles.empty_sums(KEYS.panels, WIDTH_V, dv_layout)
        key = keys.wait_full(turn).slice(half * ROWS, ROWS)
        value = lane_tiles.rows_of(values.tile_panels(turn), half * ROWS)
        if KEYS.panels == 1:
            key, value = key.load(key_layout), lane_tiles.load_panels(value, key_layout)
            keys.release(turn)
        query = queries.wait_full(count)
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_weights = lane_tiles.multiply_panels(value, d_outputs.tile_panels(count), zeros)
        scores = warpgroup_mma_wait(KEYS.panels, deps=(scores,))
        weights = weigh_seen(scores, stats.tile(count), first, seen, scales.scores)
        d_weights = warpgroup_mma_wait(0, deps=(d_weights,))
        weights, d_scores = as_operands(weights, d_weights, stats.tile(count), dtype, dv_layout, dk_layout)
        for start in range(first + ROWS, end, ROWS):
            query = queries.wait_full(count + 1)
            scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv_sum = lane_tiles.add_products(weights, d_outputs.tile_panels(count), dv_sum, True)
            dk_sum = warpgroup_mma(d_scores, queries.tile(count), dk_sum, is_async=True)
            d_weights = lane_tiles.multiply_panels(value, d_outputs.tile_panels(count + 1), zeros)
            scores = warpgroup_mma_wait(1 + 2 * KEYS.panels, deps=(scores,))
            next_weights = weigh_seen(scores, stats.tile(count + 1), start, seen, scales.scores)
            done = warpgroup_mma_wait(0, deps=(dk_sum, d_weights) + dv_sum)
            dk_sum, d_weights, dv_sum = done[0], done[1], done[2:]
            queries.release(count)
            count += 1
            weights, d_scores = as_operands(next_weights, d_weights, stats.tile(count), dtype, dv_layout, dk_layout)
        dv_sum = lane_tiles.add_products(weights, d_outputs.tile_panels(count), dv_sum, True)
        dk_sum = warpgroup_mma(d_scores, queries.tile(count), dk_sum, is_async=True)
        done = warpgroup_mma_wait(0, deps=(dk_sum,) + dv_sum)
        dk_sum, dv_sum = done[0], done[1:]
        if KEYS.panels > 1:
            keys.release(turn)
        queries.release(count)
        count += 1

        first_cell = 0
        if KEYS.cells > 0:
            first_cell = gl.load(work.first_cells + head)
        dk_sum *= scales.gradients
        place = batch, head, first_key, lane, length
        store_keys(dk_sum, dk, item, place, first_cell, job, work, D_QK, KEYS, SPLIT, ACCUMULATE)
        for panel in gl.static_range(KEYS.panels):
            store_keys(dv_sum[panel], dv, item, place, first_cell, job, work, D_V, KEYS, SPLIT, ACCUMULATE, panel)


@gluon.jit
def hopper_dkv(
    q, k, v, d_output, row_stats, dk, dv, job, work, scales,
    D_QK: gl.constexpr, D_V: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """q to row_stats: tensor descriptors. With KEYS.cells the keys are summary cells, seen from later lanes.

    SPLIT: dk and dv are parts, float32 [batch, heads, cells * work.splits, d].
    """
    dtype: gl.constexpr = q.dtype
    keys = make_ring(dtype, 2, TILE, k.block_type.shape[4], 2)
    values = beside(keys, dtype, TILE, v.block_type.shape[4], KEYS.panels)
    queries = make_ring(dtype, STAGES, ROWS, q.block_type.shape[4], 2)
    d_outputs = beside(queries, dtype, ROWS, d_output.block_type.shape[4], KEYS.panels)
    stats = beside(queries, gl.float32, 2, ROWS)
    rings = keys, values, queries, d_outputs, stats
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_dkv, (gl.constexpr(0), rings, dk, dv, job, work, scales, D_QK, D_V, KEYS, SPLIT, ACCUMULATE)),
            (compute_dkv, (gl.constexpr(1), rings, dk, dv, job, work, scales, D_QK, D_V, KEYS, SPLIT, ACCUMULATE)),
            (copy_for_dkv, ((q, k, v, d_output, row_stats), rings, job, work, KEYS, SPLIT)),
        ],
        [4, 1],  # warps of the second warpgroup and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip
