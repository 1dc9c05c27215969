"""walk_forward: attention inside a window of up to 128 positions back, for Local, as fast as memory gives the tiles.

A program walks along the sequence in tiles of 64 positions and keeps the keys and values of the last ones in shared
memory, so that each is read once, and again only where a program's part begins. The parts are equal and run on from one
head into the next. Before a head's first tile there are `BACK` tiles that the copy engine fills with zeros.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longstride.attention.kernels.call import Forward
from longstride.attention.kernels.hopper.lane_boxes import TILE, copy_in, copy_out, lane_box, walking_programs
from longstride.attention.kernels.hopper.lane_settings import walk_forward_settings
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.primitives import LOWEST
from longstride.patterns.geometry import Lanes


@gluon.jit
def place(position, heads, tiles, BACK: gl.constexpr):
    """Batch, head and tile there; a tile below 0 is one of those before the sequence."""
    head = position // (tiles + BACK)
    return head // heads, head % heads, position % (tiles + BACK) - BACK


@gluon.jit
def following(batch, head, tile, heads, tiles, BACK: gl.constexpr):
    """The place after this one."""
    tile += 1
    head += (tile == tiles).to(gl.int32)
    tile = gl.where(tile == tiles, -BACK, tile)
    batch += (head == heads).to(gl.int32)
    head = gl.where(head == heads, 0, head)
    return batch, head, tile


@gluon.jit
def fetch(queries, keys, values, batch, head, tile, present, full, q_tile, k_tile, v_tile):
    """Starts to copy the tile at a place in, if it is present."""
    mbarrier.expect(full, 3 * q_tile.shape[0] * q_tile.shape[1] * 2, pred=present)
    copy_in(queries, batch, head, 0, tile * 64, full, q_tile, present)
    copy_in(keys, batch, head, 0, tile * 64, full, k_tile, present)
    copy_in(values, batch, head, 0, tile * 64, full, v_tile, present)


@gluon.jit
def hide(scores, tile, zero, DISTANCE: gl.constexpr, FAR: gl.constexpr, layout: gl.constexpr):
    """Leaves the pairs with a tile DISTANCE tiles back that are in the window. The largest score left of each query, too."""
    row = zero + gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    if DISTANCE == 0:
        scores = gl.where(column[None, :] <= row[:, None], scores, float("-inf"))
    if DISTANCE * 64 + 63 > FAR:
        scores = gl.where(column[None, :] >= row[:, None] + (DISTANCE * 64 - FAR), scores, float("-inf"))
    largest = gl.max(scores, 1)
    if DISTANCE > 0:
        largest = gl.where(tile >= DISTANCE, largest, float("-inf"))
    return scores, largest


@gluon.jit
def weigh(scores, largest, tile, scale, DISTANCE: gl.constexpr):
    """The weights; none where the tile would be before the sequence."""
    if DISTANCE > 0:
        largest = gl.where(tile >= DISTANCE, largest, float("inf"))
    return gl.exp2(scores * scale - largest[:, None])


@gluon.jit
def walk_forward(
    queries, keys, values, results, log_sum_exp, heads, n, tiles, total, scale,
    FAR: gl.constexpr, BACK: gl.constexpr, D: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = queries.dtype
    RING: gl.constexpr = AHEAD + BACK
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [AHEAD, 64, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [RING, 64, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [RING, 64, D], tile_layout)
    staged = gl.allocate_shared_memory(dtype, [64, D], tile_layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    start = (gl.program_id(0) * total.to(gl.int64) // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * total.to(gl.int64) // gl.num_programs(0)).to(gl.int32)
    for slot in gl.static_range(RING):
        # The tiles before the program's own have keys and values for it, but no queries.
        if slot < BACK:
            batch, head, tile = place(start - BACK + slot, heads, tiles, BACK)
            mbarrier.expect(full.index(slot), 2 * 64 * D * 2)
            copy_in(keys, batch, head, 0, tile * 64, full.index(slot), k_tiles.index(slot), True)
            copy_in(values, batch, head, 0, tile * 64, full.index(slot), v_tiles.index(slot), True)
        else:
            batch, head, tile = place(start - BACK + slot, heads, tiles, BACK)
            fetch(
                queries, keys, values, batch, head, tile, start - BACK + slot < end, full.index(slot),
                q_tiles.index(slot - BACK), k_tiles.index(slot), v_tiles.index(slot),
            )  # fmt: skip
    for slot in gl.static_range(BACK):
        mbarrier.wait(full.index(slot), 0)

    batch, head, tile = place(start, heads, tiles, BACK)
    ahead_batch, ahead_head, ahead_tile = place(start + AHEAD, heads, tiles, BACK)
    for position in range(start, end):
        number = position - start
        # Not known to be 0 before the loop: masks that the compiler makes there would fill the registers.
        zero = number >> 30
        now = (number + BACK) % RING
        q_tile = q_tiles.index(number % AHEAD)
        mbarrier.wait(full.index(now), ((number + BACK) // RING) & 1)
        if tile >= 0:
            zeros = gl.zeros([64, 64], gl.float32, layout)
            one = (number + BACK - 1) % RING
            two = number % RING
            scores_0 = warpgroup_mma(q_tile, k_tiles.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores_1 = warpgroup_mma(q_tile, k_tiles.index(one).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if BACK == 2:
                scores_2 = warpgroup_mma(q_tile, k_tiles.index(two).permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores_0 = warpgroup_mma_wait(2, deps=(scores_0,))
            else:
                scores_0 = warpgroup_mma_wait(1, deps=(scores_0,))
            scores_0, largest = hide(scores_0, tile, zero, 0, FAR, layout)
            if BACK == 2:
                scores_1, scores_2 = warpgroup_mma_wait(0, deps=(scores_1, scores_2))
                scores_2, largest_2 = hide(scores_2, tile, zero, 2, FAR, layout)
                largest = gl.maximum(largest, largest_2)
            else:
                scores_1 = warpgroup_mma_wait(0, deps=(scores_1,))
            scores_1, largest_1 = hide(scores_1, tile, zero, 1, FAR, layout)
            largest = gl.maximum(gl.maximum(largest, largest_1) * scale, LOWEST)  # A score of -inf weighs 0.
            sums = gl.zeros([64, D], gl.float32, sum_layout)
            weights = weigh(scores_0, largest, tile, scale, 0)
            added = weights
            operand_0 = gl.convert_layout(weights.to(dtype), weight_layout)
            sums = warpgroup_mma(operand_0, v_tiles.index(now), sums, use_acc=False, is_async=True)
            weights = weigh(scores_1, largest, tile, scale, 1)
            added += weights
            operand_1 = gl.convert_layout(weights.to(dtype), weight_layout)
            sums = warpgroup_mma(operand_1, v_tiles.index(one), sums, is_async=True)
            if BACK == 2:
                weights = weigh(scores_2, largest, tile, scale, 2)
                added += weights
                operand_2 = gl.convert_layout(weights.to(dtype), weight_layout)
                sums = warpgroup_mma(operand_2, v_tiles.index(two), sums, is_async=True)
            weight = gl.sum(added, 1)
            row = tile * 64 + gl.arange(0, 64, row_layout)
            places = log_sum_exp + (batch * heads + head).to(gl.int64) * n + row
            gl.store(places, largest + gl.log2(weight), mask=row < n)
            inverse = gl.convert_layout(1.0 / gl.where(weight == 0, 1.0, weight), gl.SliceLayout(1, sum_layout))
            tma.store_wait(0)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            staged.store((sums * inverse[:, None]).to(dtype))
            fence_async_shared()
            copy_out(results, batch, head, 0, tile * 64, staged)
        later = (number + BACK + AHEAD) % RING
        fetch(
            queries, keys, values, ahead_batch, ahead_head, ahead_tile, position + AHEAD < end, full.index(later),
            q_tile, k_tiles.index(later), v_tiles.index(later),
        )  # fmt: skip
        batch, head, tile = following(batch, head, tile, heads, tiles, BACK)
        ahead_batch, ahead_head, ahead_tile = following(ahead_batch, ahead_head, ahead_tile, heads, tiles, BACK)
    tma.store_wait(0)


def launch_walk_forward(call: Forward, reach: int) -> Launch:
    """For Local(reach), reach <= 128."""
    q, k, v, output, lse = call.tensors
    batch, heads, n, d = q.shape
    assert reach <= 2 * TILE
    assert lse.is_contiguous()
    setting = walk_forward_settings(d)
    whole = Lanes(0, 1, n, n, 1)
    tiles, back = -(-n // TILE), 1 if reach <= TILE else 2
    total = batch * heads * (tiles + back)
    boxes = (lane_box(x, whole, TILE) for x in (q, k, v, output))
    constants = {
        "FAR": reach, "BACK": back, "D": d, "AHEAD": setting.ahead, "num_warps": 4, "maxnreg": setting.registers,
    }  # fmt: skip
    programs = walking_programs(q, setting.per_processor, total)
    return Launch(walk_forward, programs, (*boxes, lse, heads, n, tiles, total, call.scale), constants)
