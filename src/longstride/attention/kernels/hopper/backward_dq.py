"""hopper_dq: the gradient of queries, as in backward.py, with TMA copies and asynchronous products.

The tiles, and who copies and computes what, are those of window_forward.py. A warpgroup has 64 queries, and keeps them and
the output's gradient in registers. While it does the arithmetic of 64 keys, the products for the next 64 run.
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


class WarpgroupQueries(NamedTuple):
    """What a warpgroup keeps of its 64 queries."""

    q: Any
    d_output: Any  # for each panel
    lse: Any
    delta: Any
    sight: Any


@gluon.jit
def copy_for_dq(sources, rings, job, work, KEYS: gl.constexpr):
    """The producer warp."""
    q, d_output, k, v, k_cells, v_cells = sources
    queries, d_outputs, keys, values = rings
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, lane, first_row = tiles.locate_tile(item_of_round(turn), job, work, KEYS)
        cell_tiles, first_tile, window = tiles.key_tiles(lane, first_row, job, KEYS)
        fill_both(queries, d_outputs, turn, q, d_output, tiles.lane_coordinates(batch, head, lane, first_row, work))
        if KEYS.cells > 0:
            first_cell = gl.load(work.first_cells + head)
            for tile in range(cell_tiles):
                place = tiles.cell_coordinates(batch, head, tile * TILE, first_cell, KEYS)
                fill_both(keys, values, count, k_cells, v_cells, place)
                count += 1
        for tile in range(window):
            place = tiles.lane_coordinates(batch, head, lane, (first_tile + tile) * TILE, work)
            fill_both(keys, values, count, k, v, place)
            count += 1


@gluon.jit
def begin_pairs(queries, keys, values, turn, offset: gl.constexpr):
    """Starts the products for the scores of half a tile's pairs, and for the gradients of their weights."""
    layout: gl.constexpr = queries.q.type.layout.parent
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
    key = keys.tile(turn).slice(offset, ROWS).permute((1, 0))
    scores = warpgroup_mma(queries.q, key, zeros, use_acc=False, is_async=True)
    value = lane_tiles.rows_of(values.tile_panels(turn), offset)
    return scores, lane_tiles.multiply_panels(queries.d_output, value, zeros)


@gluon.jit
def score_gradients(
    pairs, queries, start, is_cell, job, scale, layout: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """The gradients of the scores, as an operand. pairs: the scores, and the gradients of the weights."""
    scores, d_weights = pairs
    if MASKED:
        scores = tiles.mask_scores(scores, start, is_cell, queries.sight, job, KEYS, False)
    weights = gl.exp2(scores * scale - queries.lse[:, None])
    return gl.convert_layout((weights * (d_weights - queries.delta[:, None])).to(queries.q.dtype), layout)


@gluon.jit
def add_half_pairs(
    pairs, dq_sum, queries, keys, values, turn, offset: gl.constexpr, start, is_cell, job, scale,
    KEYS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds half a tile's pairs, whose products are there. Returns those of the other half, of this tile or the next one,
    which run meanwhile.
    """
    sum_layout: gl.constexpr = dq_sum.type.layout
    if offset > 0:
        keys.wait_full(turn + 1)
        next_pairs = begin_pairs(queries, keys, values, turn + 1, 0)
    else:
        next_pairs = begin_pairs(queries, keys, values, turn, ROWS)
    d_scores = score_gradients(
        pairs, queries, start + offset, is_cell, job, scale, tiles.operand_layout(sum_layout), KEYS, MASKED
    )  # fmt: skip
    dq_sum = warpgroup_mma(d_scores, keys.tile(turn).slice(offset, ROWS), dq_sum, is_async=True)
    next_pairs = warpgroup_mma_wait(1, deps=next_pairs)
    return next_pairs, warpgroup_mma_wait(0, deps=(dq_sum,))


@gluon.jit
def compute_dq(
    half: gl.constexpr, rings, row_stats, dq, job, work, scales,
    D_QK: gl.constexpr, KEYS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup, for one half of a tile's queries."""
    queries, d_outputs, keys, values = rings
    WIDTH_QK: gl.constexpr = keys.tiles.shape[2]
    pair_layout: gl.constexpr = tiles.mma_layout(ROWS)
    query_layout: gl.constexpr = tiles.operand_layout(pair_layout)
    sum_layout: gl.constexpr = tiles.mma_layout(WIDTH_QK)
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, lane, first_row = tiles.locate_tile(item_of_round(turn), job, work, KEYS)
        cell_tiles, first_tile, window = tiles.key_tiles(lane, first_row, job, KEYS)
        first_row += half * ROWS
        first_cell = 0
        if not KEYS.own:
            first_cell = gl.load(work.first_cells + head)
        length = tiles.lane_length(lane, job, work.n)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, pair_layout))
        stats = row_stats.data + (batch * work.heads + head).to(gl.int64) * 2 * row_stats.row + lane * work.stats_shift
        lse = gl.load(stats + row, mask=row < length, other=0.0)
        delta = gl.load(stats + row_stats.row + row, mask=row < length, other=0.0)

        dq_sum = gl.zeros([ROWS, WIDTH_QK], gl.float32, sum_layout)
        query = queries.wait_full(turn).slice(half * ROWS, ROWS).load(query_layout)
        d_output = lane_tiles.load_panels(lane_tiles.rows_of(d_outputs.tile_panels(turn), half * ROWS), query_layout)
        queries.release(turn)
        own = WarpgroupQueries(query, d_output, lse, delta, tiles.Sight(first_row, lane * job.cells, first_cell))
        keys.wait_full(count)
        pairs = warpgroup_mma_wait(0, deps=begin_pairs(own, keys, values, count, 0))
        total = cell_tiles + window
        # Of cells alone, none but the last tile has any that are masked.
        for tile in range(total - 1):
            start = tiles.first_key(tile, cell_tiles, first_tile)
            for offset in gl.static_range(0, TILE, ROWS):
                pairs, dq_sum = add_half_pairs(
                    pairs, dq_sum, own, keys, values, count, offset, start, tile < cell_tiles, job, scales.scores,
                    KEYS, KEYS.window,
                )  # fmt: skip
            keys.release(count)
            count += 1
        start = tiles.first_key(total - 1, cell_tiles, first_tile)
        is_cell = total <= cell_tiles
        # The second half of a window's last tile comes after all queries of the first warpgroup.
        LAST: gl.constexpr = ROWS * (1 - (half == 0 and KEYS.window))
        if LAST > 0:
            pairs, dq_sum = add_half_pairs(
                pairs, dq_sum, own, keys, values, count, 0, start, is_cell, job, scales.scores, KEYS, True
            )  # fmt: skip
        d_scores = score_gradients(
            pairs, own, start + LAST, is_cell, job, scales.scores, tiles.operand_layout(sum_layout), KEYS, True
        )  # fmt: skip
        dq_sum = warpgroup_mma(d_scores, keys.tile(count).slice(LAST, ROWS), dq_sum, is_async=True)
        dq_sum = warpgroup_mma_wait(0, deps=(dq_sum,))
        keys.release(count)
        count += 1

        dq_sum = gl.convert_layout(dq_sum, tiles.row_layout(WIDTH_QK)) * scales.gradients
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, tiles.row_layout(WIDTH_QK)))
        position = lane * job.lane_stride + row * job.index_stride
        tiles.store_gradient(dq_sum, dq, batch, head, position, row < length, D_QK, ACCUMULATE)


@gluon.jit
def hopper_dq(
    q, d_output, k, v, k_cells, v_cells, row_stats, dq, job, work, scales,
    D_QK: gl.constexpr, KEYS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """q to v_cells: tensor descriptors. ACCUMULATE: adds to the dq of an earlier pass."""
    dtype: gl.constexpr = q.dtype
    queries = make_ring(dtype, 2, TILE, q.block_type.shape[4], 2)
    d_outputs = beside(queries, dtype, TILE, d_output.block_type.shape[4], KEYS.panels)
    keys = make_ring(dtype, 3 if KEYS.panels == 1 else 2, TILE, k.block_type.shape[4], 2)
    values = beside(keys, dtype, TILE, v.block_type.shape[4], KEYS.panels)
    rings = queries, d_outputs, keys, values
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_dq, (gl.constexpr(0), rings, row_stats, dq, job, work, scales, D_QK, KEYS, ACCUMULATE)),
            (compute_dq, (gl.constexpr(1), rings, row_stats, dq, job, work, scales, D_QK, KEYS, ACCUMULATE)),
            (copy_for_dq, ((q, d_output, k, v, k_cells, v_cells), rings, job, work, KEYS)),
        ],
        [4, 1],  # warps of the second warpgroup and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip
