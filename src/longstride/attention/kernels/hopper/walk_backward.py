"""walk_backward: the gradients inside a window of up to 128 positions back, for Local: dq, dk and dv in one kernel.

A program walks along the sequence as walk_forward does, here from one tile of keys to the next: 64 keys are seen by the
queries of their own tile and of the `back` tiles after it. These stay in shared memory, and their dq in registers, until all
their keys are through. So a part begins `back` tiles early, and writes nothing there. Pairs lie keys down and queries
across, as in lane_backward. After a head's last tile there are `back` tiles of zeros.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from longstride.attention.kernels.call import Backward
from longstride.attention.kernels.hopper.lane_descriptors import copy_all, copy_out, walk_launch, walk_place, walk_range
from longstride.attention.kernels.hopper.lane_settings import walk_backward_settings
from longstride.attention.kernels.hopper.pair_gradients import QueryTile, add_pairs, without_keys
from longstride.attention.kernels.hopper.ring import make_barriers, make_tiles
from longstride.attention.kernels.hopper.tiles import mma_layout, row_layout
from longstride.attention.kernels.launch import Launch


@gluon.jit
def fetch(queries, query_tiles, keys, key_tiles, position, end, work, full, BACK: gl.constexpr):
    """Starts to copy in the keys of a position, and the last queries that see them."""
    present = position < end
    tile_bytes: gl.constexpr = key_tiles[0].shape[0] * key_tiles[0].shape[1] * 2
    mbarrier.expect(full, 5 * tile_bytes, pred=present)
    batch, head, tile = walk_place(position + BACK, work, BACK)
    copy_all(queries, batch, head, 0, tile * 64, full, query_tiles, present)
    batch, head, tile = walk_place(position, work, BACK)
    copy_all(keys, batch, head, 0, tile * 64, full, key_tiles, present)


@gluon.jit
def store_tile(value, descriptor, batch, head, tile, staged):
    """Starts to write a tile of a gradient."""
    tma.store_wait(2)
    staged.store(value.to(descriptor.dtype))
    fence_async_shared()
    copy_out(descriptor, batch, head, 0, tile * 64, staged)


@gluon.jit
def walk_backward(
    q, k, v, d_output, output, dq, dk, dv, lse, work, scale, softmax_scale, WALK: gl.constexpr
):  # fmt: skip
    """q to dv: tensor descriptors."""
    dtype: gl.constexpr = q.dtype
    D: gl.constexpr = q.block_type.shape[4]
    FAR: gl.constexpr = WALK.far
    BACK: gl.constexpr = WALK.back
    AHEAD: gl.constexpr = WALK.ahead
    PART: gl.constexpr = WALK.part
    RING: gl.constexpr = AHEAD + BACK
    sum_layout: gl.constexpr = mma_layout(D)
    load_layout: gl.constexpr = row_layout(D)
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = make_tiles(dtype, RING, 64, D)
    d_output_tiles = make_tiles(dtype, RING, 64, D)
    k_tiles = make_tiles(dtype, AHEAD, 64, D)
    v_tiles = make_tiles(dtype, AHEAD, 64, D)
    output_tiles = make_tiles(dtype, AHEAD, 64, D)
    d_scores_tile = make_tiles(dtype, 1, 64, 64).index(0)
    staging = make_tiles(dtype, 3, 64, D)
    lse_rows = gl.allocate_shared_memory(gl.float32, [RING, 64], vector_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [RING, 64], vector_layout)
    full = make_barriers(AHEAD)
    fence_async_shared()
    start, end = walk_range(work.positions)
    # What the first BACK tiles of queries are does not matter: no result of theirs is written here.
    first = start - BACK
    for slot in gl.static_range(AHEAD):
        newest = (slot + BACK) % RING
        fetch(
            (output, d_output, q), (output_tiles.index(slot), d_output_tiles.index(newest), q_tiles.index(newest)),
            (k, v), (k_tiles.index(slot), v_tiles.index(slot)), first + slot, end, work, full.index(slot), BACK,
        )  # fmt: skip

    row = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    dq_next = gl.zeros([64, D], gl.float32, sum_layout)
    dq_last = gl.zeros([64, D], gl.float32, sum_layout)
    for position in range(first, end):
        count = position - first
        # Not known to be 0 before the loop: masks and addresses that the compiler makes there would fill the registers.
        zero = count >> 30
        batch, head, tile = walk_place(position + BACK, work, BACK)
        index = tile * 64 + row
        pointers = lse + (batch * work.heads + head).to(gl.int64) * work.n + index
        # The last positions have no newer tile: memory after the last head is not the caller's.
        valid = (index >= 0) & (index < work.n) & (position + BACK < work.positions)
        newest_lse = without_keys(gl.load(pointers, mask=valid, other=float("inf")))
        batch, head, tile = walk_place(position, work, BACK)
        stage = count % AHEAD + zero
        now = count % RING
        after = (count + 1) % RING
        newest = (count + BACK) % RING
        k_tile, v_tile, output_tile = k_tiles.index(stage), v_tiles.index(stage), output_tiles.index(stage)
        mbarrier.wait(full.index(stage), (count // AHEAD) & 1)
        lse_rows.index(newest).store(newest_lse)
        d_outputs = d_output_tiles.index(newest).load(load_layout).to(gl.float32)
        outputs = output_tile.load(load_layout).to(gl.float32)
        delta_rows.index(newest).store(gl.sum(d_outputs * outputs, 1))
        if (tile >= 0) & (tile < work.tiles):
            dk_sum = gl.zeros([64, D], gl.float32, sum_layout)
            dv_sum = gl.zeros([64, D], gl.float32, sum_layout)
            queries = QueryTile(
                q_tiles.index(now), d_output_tiles.index(now), lse_rows.index(now), delta_rows.index(now)
            )  # fmt: skip
            dq_sum, dk_sum, dv_sum = add_pairs(
                dq_next, dk_sum, dv_sum, queries, k_tile, v_tile, d_scores_tile, scale, zero, 0, 0, FAR, PART, False, True
            )  # fmt: skip
            if position >= start:
                store_tile(dq_sum * softmax_scale, dq, batch, head, tile, staging.index(0))
            queries = QueryTile(
                q_tiles.index(after), d_output_tiles.index(after), lse_rows.index(after), delta_rows.index(after)
            )  # fmt: skip
            dq_next, dk_sum, dv_sum = add_pairs(
                dq_last, dk_sum, dv_sum, queries, k_tile, v_tile, d_scores_tile, scale, zero, 64, 0, FAR, PART, BACK == 1,
                False,
            )  # fmt: skip
            if BACK == 2:
                queries = QueryTile(
                    q_tiles.index(newest), d_output_tiles.index(newest), lse_rows.index(newest), delta_rows.index(newest)
                )  # fmt: skip
                dq_last, dk_sum, dv_sum = add_pairs(
                    dq_last, dk_sum, dv_sum, queries, k_tile, v_tile, d_scores_tile, scale, zero, 128, 0, FAR, PART, True,
                    False,
                )  # fmt: skip
            if position >= start:
                store_tile(dk_sum * softmax_scale, dk, batch, head, tile, staging.index(1))
                store_tile(dv_sum, dv, batch, head, tile, staging.index(2))
        else:
            dq_next = gl.zeros([64, D], gl.float32, sum_layout)
            dq_last = gl.zeros([64, D], gl.float32, sum_layout)
        fetch(
            (output, d_output, q), (output_tile, d_output_tiles.index(now), q_tiles.index(now)), (k, v), (k_tile, v_tile),
            position + AHEAD, end, work, full.index(stage), BACK,
        )  # fmt: skip
    tma.store_wait(0)


def launch_walk_backward(call: Backward, reach: int) -> Launch:
    """For Local(reach), reach <= 128."""
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    matrices = q, k, v, d_output, output, dq, dk, dv
    return walk_launch(walk_backward, matrices, lse, reach, walk_backward_settings(q.shape[3]), *call.scales)
