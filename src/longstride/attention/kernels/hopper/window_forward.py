"""window_forward: a window of the own lane, one pattern in all heads, with TMA copies and asynchronous products.

One warp copies tiles of keys and values into shared memory. Each of two warpgroups has 64 queries. While one takes the
softmax of a tile, its product of the queries with the next tile's keys runs; and while one warpgroup does arithmetic, the
other uses the tensor cores. Programs are persistent: the next queries are loaded while results are written.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper import lane_tiles, tiles
from longstride.attention.kernels.hopper.ring import item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, TILE

STAGES = gl.constexpr(4)


@gluon.jit
def copy_window(q, k, v, queries, keys, values, job, work, KEYS: gl.constexpr):
    """The producer warp."""
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, lane, first_row = tiles.locate_tile(item_of_round(turn), job, work, KEYS)
        _, first_tile, total = tiles.key_tiles(lane, first_row, job, KEYS)
        for group in gl.static_range(2):
            queries.fill(2 * turn + group, q, tiles.lane_coordinates(batch, head, lane, first_row + group * ROWS, work))
        for tile in range(total):
            place = tiles.lane_coordinates(batch, head, lane, (first_tile + tile) * TILE, work)
            keys.fill(count, k, place)
            values.fill(count, v, place)
            count += 1


@gluon.jit
def add_softmax(scores, state, value, scale):
    """Takes the softmax of a tile's scores, and starts the product of its weights with the values."""
    running_max, weight, sums = state
    weights, shrink, running_max, weight = tiles.take_softmax(scores, running_max, weight, scale)
    return running_max, weight, lane_tiles.add_products(weights, (value,), lane_tiles.scale_rows(sums, shrink), True)


@gluon.jit
def compute_tile(scores, state, query, keys, values, count, tile, sight, job, scale, KEYS: gl.constexpr):
    """Adds a tile whose scores are there. Returns the scores of the next one, which are computed meanwhile."""
    layout: gl.constexpr = scores.type.layout
    zeros = gl.zeros([ROWS, TILE], gl.float32, layout)
    key = keys.wait_full(count + 1)
    scoring = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = tiles.mask_scores(scores, tile * TILE, False, sight, job, KEYS, False)
    running_max, weight, adding = add_softmax(scores, state, values.wait_full(count), scale)
    following = warpgroup_mma_wait(1, deps=(scoring,))
    keys.release(count + 1)
    sums = lane_tiles.wait_for(adding)
    values.release(count)
    return following, (running_max, weight, sums)


@gluon.jit
def compute_window(
    group: gl.constexpr, queries, keys, values, output, lse, job, work, scale,
    D_V: gl.constexpr, KEYS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup, for its 64 rows of an item."""
    WIDTH_V: gl.constexpr = values.tiles.shape[2]
    layout: gl.constexpr = tiles.mma_layout(TILE)
    zeros = gl.zeros([ROWS, TILE], gl.float32, layout)
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, lane, first_row = tiles.locate_tile(item_of_round(turn), job, work, KEYS)
        _, first_tile, total = tiles.key_tiles(lane, first_row, job, KEYS)
        first_row += group * ROWS
        length = tiles.lane_length(lane, job, work.n)
        rows = tiles.place_rows(output, lse, batch, head, lane, first_row, length, job, work, layout)
        sight = tiles.Sight(first_row, 0, 0)
        state = tiles.begin_softmax(rows, layout, D_V, WIDTH_V, 1, ACCUMULATE)

        query = queries.wait_full(2 * turn + group)
        scoring = warpgroup_mma(query, keys.wait_full(count).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scoring,))
        keys.release(count)
        for tile in range(first_tile, first_tile + total - 1):
            scores, state = compute_tile(scores, state, query, keys, values, count, tile, sight, job, scale, KEYS)
            count += 1
        # There is no next tile whose scores could be computed meanwhile, and most often there are pairs to mask.
        queries.release(2 * turn + group)
        start = (first_tile + total - 1) * TILE
        scores = tiles.mask_scores(scores, start, False, sight, job, KEYS, True)
        running_max, weight, adding = add_softmax(scores, state, values.wait_full(count), scale)
        sums = lane_tiles.wait_for(adding)
        values.release(count)
        count += 1

        nothing = weight == 0
        weight = gl.where(nothing, 1.0, weight)
        result = sums[0] / gl.convert_layout(weight, gl.SliceLayout(1, tiles.mma_layout(WIDTH_V)))[:, None]
        tiles.store_rows((result,), running_max, weight, nothing, rows, D_V)


@gluon.jit
def window_forward(q, k, v, output, lse, job, work, scale, D_V: gl.constexpr, KEYS: gl.constexpr, ACCUMULATE: gl.constexpr):
    """q, k, v: tensor descriptors. ACCUMULATE: continues from the output and lse of an earlier pass."""
    dtype: gl.constexpr = q.dtype
    queries = make_ring(dtype, 4, ROWS, q.block_type.shape[4], 1)
    keys = make_ring(dtype, STAGES, TILE, k.block_type.shape[4], 2)
    values = make_ring(dtype, STAGES, TILE, v.block_type.shape[4], 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_window, (gl.constexpr(0), queries, keys, values, output, lse, job, work, scale, D_V, KEYS, ACCUMULATE)),
            (compute_window, (gl.constexpr(1), queries, keys, values, output, lse, job, work, scale, D_V, KEYS, ACCUMULATE)),
            (copy_window, (q, k, v, queries, keys, values, job, work, KEYS)),
        ],
        [4, 1],  # warps of the second warpgroup and of the producer
        [240, 24],  # and their registers
    )
