"""walk_backward: the gradients inside a window of up to 128 positions back, for Local: dq, dk and dv in one go.

A program walks along the sequence as walk_forward does, here from one tile of keys to the next: 64 keys are seen by the
queries of their own tile and of the `BACK` tiles after it, which stay in shared memory, and whose dq stays in registers
until all their keys are through. So that these are complete, a part begins `BACK` tiles early, with nothing written there.
Pairs lie keys down and queries across, as in lane_backward. After a head's last tile there are `BACK` tiles of zeros.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from longstride.attention.kernels.call import Backward
from longstride.attention.kernels.hopper.lane_boxes import TILE, copy_in, copy_out, lane_box, walking_programs
from longstride.attention.kernels.hopper.lane_settings import walk_backward_settings
from longstride.attention.kernels.hopper.pair_slopes import add_pairs, without_keys
from longstride.attention.kernels.launch import Launch
from longstride.patterns.geometry import Lanes


@gluon.jit
def place(position, heads, tiles, BACK: gl.constexpr):
    """Batch, head and tile there; a tile from `tiles` on, or below 0, is not in the sequence."""
    head = position // (tiles + BACK)
    return head // heads, head % heads, position % (tiles + BACK)


@gluon.jit
def fetch(
    queries, keys, values, gradients, outputs, position, end, heads, tiles, full, q_tile, k_tile, v_tile, gradient_tile,
    output_tile, BACK: gl.constexpr,
):  # fmt: skip
    """Starts to copy in the keys of a position, and the last queries that see them."""
    present = position < end
    mbarrier.expect(full, 5 * q_tile.shape[0] * q_tile.shape[1] * 2, pred=present)
    batch, head, tile = place(position + BACK, heads, tiles, BACK)
    copy_in(outputs, batch, head, 0, tile * 64, full, output_tile, present)
    copy_in(gradients, batch, head, 0, tile * 64, full, gradient_tile, present)
    copy_in(queries, batch, head, 0, tile * 64, full, q_tile, present)
    batch, head, tile = place(position, heads, tiles, BACK)
    copy_in(keys, batch, head, 0, tile * 64, full, k_tile, present)
    copy_in(values, batch, head, 0, tile * 64, full, v_tile, present)


@gluon.jit
def emit(value, box, batch, head, tile, staged):
    """Starts to write a tile of a gradient."""
    tma.store_wait(2)
    staged.store(value.to(box.dtype))
    fence_async_shared()
    copy_out(box, batch, head, 0, tile * 64, staged)


@gluon.jit
def walk_backward(
    queries, keys, values, gradients, outputs, query_slopes, key_slopes, value_slopes, log_sum_exp,
    heads, n, tiles, total_tiles, scale, slope_scale,
    FAR: gl.constexpr, BACK: gl.constexpr, D: gl.constexpr, AHEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = queries.dtype
    RING: gl.constexpr = AHEAD + BACK
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [RING, 64, D], tile_layout)
    gradient_tiles = gl.allocate_shared_memory(dtype, [RING, 64, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [AHEAD, 64, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [AHEAD, 64, D], tile_layout)
    output_tiles = gl.allocate_shared_memory(dtype, [AHEAD, 64, D], tile_layout)
    slopes_tile = gl.allocate_shared_memory(dtype, [64, 64], slopes_layout)
    staging = gl.allocate_shared_memory(dtype, [3, 64, D], tile_layout)
    totals = gl.allocate_shared_memory(gl.float32, [RING, 64], vector_layout)
    means = gl.allocate_shared_memory(gl.float32, [RING, 64], vector_layout)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(AHEAD):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    start = (gl.program_id(0) * total_tiles.to(gl.int64) // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * total_tiles.to(gl.int64) // gl.num_programs(0)).to(gl.int32)
    # What the first BACK tiles of queries are does not matter: no result of theirs is written here.
    first = start - BACK
    for slot in gl.static_range(AHEAD):
        fetch(
            queries, keys, values, gradients, outputs, first + slot, end, heads, tiles, full.index(slot),
            q_tiles.index((slot + BACK) % RING), k_tiles.index(slot), v_tiles.index(slot),
            gradient_tiles.index((slot + BACK) % RING), output_tiles.index(slot), BACK,
        )  # fmt: skip

    row = gl.arange(0, 64, row_layout)
    dq_next = gl.zeros([64, D], gl.float32, sum_layout)
    dq_last = gl.zeros([64, D], gl.float32, sum_layout)
    for position in range(first, end):
        number = position - first
        # Not known to be 0 before the loop: masks and addresses that the compiler makes there would fill the registers.
        zero = number >> 30
        batch, head, tile = place(position + BACK, heads, tiles, BACK)
        index = tile * 64 + row
        places = log_sum_exp + (batch * heads + head).to(gl.int64) * n + index
        total = without_keys(gl.load(places, mask=(index >= 0) & (index < n), other=float("inf")))
        batch, head, tile = place(position, heads, tiles, BACK)
        stage = number % AHEAD + zero
        now = number % RING
        one = (number + 1) % RING
        newest = (number + BACK) % RING
        k_tile, v_tile, output_tile = k_tiles.index(stage), v_tiles.index(stage), output_tiles.index(stage)
        mbarrier.wait(full.index(stage), (number // AHEAD) & 1)
        totals.index(newest).store(total)
        slope = gradient_tiles.index(newest).load(load_layout).to(gl.float32)
        result = output_tile.load(load_layout).to(gl.float32)
        means.index(newest).store(gl.sum(slope * result, 1))
        if (tile >= 0) & (tile < tiles):
            dk_sum = gl.zeros([64, D], gl.float32, sum_layout)
            dv_sum = gl.zeros([64, D], gl.float32, sum_layout)
            dq_sum, dk_sum, dv_sum = add_pairs(
                dq_next, dk_sum, dv_sum, q_tiles.index(now), k_tile, v_tile, gradient_tiles.index(now), slopes_tile,
                totals.index(now), means.index(now), scale, zero, 0, 0, FAR, PART, False, True, sum_layout,
            )  # fmt: skip
            if position >= start:
                emit(dq_sum * slope_scale, query_slopes, batch, head, tile, staging.index(0))
            dq_next, dk_sum, dv_sum = add_pairs(
                dq_last, dk_sum, dv_sum, q_tiles.index(one), k_tile, v_tile, gradient_tiles.index(one), slopes_tile,
                totals.index(one), means.index(one), scale, zero, 64, 0, FAR, PART, BACK == 1, False, sum_layout,
            )  # fmt: skip
            if BACK == 2:
                dq_last, dk_sum, dv_sum = add_pairs(
                    dq_last, dk_sum, dv_sum, q_tiles.index(newest), k_tile, v_tile, gradient_tiles.index(newest),
                    slopes_tile, totals.index(newest), means.index(newest), scale, zero, 128, 0, FAR, PART, True, False,
                    sum_layout,
                )  # fmt: skip
            if position >= start:
                emit(dk_sum * slope_scale, key_slopes, batch, head, tile, staging.index(1))
                emit(dv_sum, value_slopes, batch, head, tile, staging.index(2))
        else:
            dq_next = gl.zeros([64, D], gl.float32, sum_layout)
            dq_last = gl.zeros([64, D], gl.float32, sum_layout)
        fetch(
            queries, keys, values, gradients, outputs, position + AHEAD, end, heads, tiles, full.index(stage),
            q_tiles.index(now), k_tile, v_tile, gradient_tiles.index(now), output_tile, BACK,
        )  # fmt: skip
    tma.store_wait(0)


def launch_walk_backward(call: Backward, reach: int) -> Launch:
    """For Local(reach), reach <= 128."""
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    batch, heads, n, d = q.shape
    assert reach <= 2 * TILE
    assert lse.is_contiguous()
    setting = walk_backward_settings(d)
    whole = Lanes(0, 1, n, n, 1)
    tiles, back = -(-n // TILE), 1 if reach <= TILE else 2
    total = batch * heads * (tiles + back)
    boxes = (lane_box(x, whole, TILE) for x in (q, k, v, d_output, output, dq, dk, dv))
    constants = {
        "FAR": reach, "BACK": back, "D": d, "AHEAD": setting.ahead, "PART": setting.part, "num_warps": 4,
        "maxnreg": setting.registers,
    }  # fmt: skip
    programs = walking_programs(q, setting.per_processor, total)
    return Launch(walk_backward, programs, (*boxes, lse, heads, n, tiles, total, *call.scales), constants)
