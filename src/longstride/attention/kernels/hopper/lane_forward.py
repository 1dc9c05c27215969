"""lane_forward: attention inside whole lanes, for Block and Column, as fast as memory gives the tiles.

A program is one warpgroup with a ring of `STAGES` lanes. It computes one while the copy engine brings the next and takes
results away, and several programs share a multiprocessor. All keys of 64 queries are at hand, up to 128 at a time, so up to
that length the softmax is taken in one go. Scores are in bits: `scale` includes log2(e).
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
from longstride.attention.kernels.hopper.lane_boxes import (
    TILE,
    copy_in,
    copy_out,
    heads_side_by_side,
    lane_box,
    lane_rows,
    locate,
)
from longstride.attention.kernels.hopper.lane_settings import lane_forward_settings
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.settings import processors
from longstride.patterns.geometry import Lanes

LONGEST = 256
"""The most positions of a lane: what a box can have."""


@gluon.jit
def fetch(
    queries, keys, values, results, item, items, heads, lanes, full, q_tile, k_tile, v_tile, staging, first_staged,
    LATER: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """Starts to copy an item in, if there is such an item; LATER: with the output that is there."""
    present = item < items
    batch, head, lane = locate(item, heads, lanes, HEADS_FIRST)
    mbarrier.expect(full, (4 if LATER else 3) * q_tile.shape[0] * q_tile.shape[1] * 2, pred=present)
    copy_in(queries, batch, head, lane, 0, full, q_tile, present)
    copy_in(keys, batch, head, lane, 0, full, k_tile, present)
    copy_in(values, batch, head, lane, 0, full, v_tile, present)
    if LATER:
        for part in gl.static_range(q_tile.shape[0] // 64):
            copy_in(results, batch, head, lane, part * 64, full, staging.index(first_staged + part), present)


@gluon.jit
def hide(scores, zero, OFFSET: gl.constexpr, NEAR: gl.constexpr, layout: gl.constexpr):
    """Leaves the pairs that are at least NEAR apart; row r is OFFSET + r - c from key c."""
    if OFFSET - 63 < NEAR:
        row = zero + gl.arange(0, 64, gl.SliceLayout(1, layout))
        column = gl.arange(0, 64, gl.SliceLayout(0, layout))
        scores = gl.where(column[None, :] <= row[:, None] + (OFFSET - NEAR), scores, float("-inf"))
    return scores


@gluon.jit
def take_keys(
    sums, weight, running_max, q_tile, k_tile, v_tile, scale, zero,
    ROW: gl.constexpr, START: gl.constexpr, MOST: gl.constexpr, NEAR: gl.constexpr, FIRST: gl.constexpr,
    layout: gl.constexpr, sum_layout: gl.constexpr,
):  # fmt: skip
    """The state of the 64 queries from ROW on after up to MOST keys from START on. FIRST: there is no state before them."""
    TWO: gl.constexpr = MOST == 128 and ROW > START
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    zeros = gl.zeros([64, 64], gl.float32, layout)
    query = q_tile.slice(ROW, 64)
    scores = warpgroup_mma(query, k_tile.slice(START, 64).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TWO:
        others = warpgroup_mma(query, k_tile.slice(START + 64, 64).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, others = warpgroup_mma_wait(0, deps=(scores, others))
        scores = hide(scores, zero, ROW - START, NEAR, layout)
        others = hide(others, zero, ROW - START - 64, NEAR, layout)
        largest = gl.max(gl.maximum(scores, others), 1) * scale
    else:
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = hide(scores, zero, ROW - START, NEAR, layout)
        largest = gl.max(scores, 1) * scale
    if not FIRST:
        largest = gl.maximum(largest, running_max)
    finite = gl.where(largest == float("-inf"), 0.0, largest)
    weights = gl.exp2(scores * scale - finite[:, None])
    if not FIRST:
        shrink = gl.exp2(running_max - finite)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout))[:, None]
    operand = gl.convert_layout(weights.to(q_tile.dtype), operand_layout)
    sums = warpgroup_mma(operand, v_tile.slice(START, 64), sums, use_acc=not FIRST, is_async=True)
    if TWO:
        more = gl.exp2(others * scale - finite[:, None])
        operand = gl.convert_layout(more.to(q_tile.dtype), operand_layout)
        sums = warpgroup_mma(operand, v_tile.slice(START + 64, 64), sums, is_async=True)
        weights += more
    added = gl.sum(weights, 1)
    if not FIRST:
        added += weight * shrink
    sums = warpgroup_mma_wait(0, deps=(sums,))
    return sums, added, largest


@gluon.jit
def lane_forward(
    queries, keys, values, results, log_sum_exp, heads, n, first, lanes, lane_step, length, index_step, items, scale,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr, MOST: gl.constexpr,
    NEAR: gl.constexpr, LATER: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """LATER: goes on from the output and the log-sum-exp that are there."""
    dtype: gl.constexpr = queries.dtype
    TILES: gl.constexpr = ROWS // 64
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    staging = gl.allocate_shared_memory(dtype, [STAGES * TILES if LATER else STAGED, 64, D], tile_layout)
    old_totals = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    for slot in gl.static_range(STAGES):
        fetch(
            queries, keys, values, results, gl.program_id(0) + slot * programs, items, heads, lanes, full.index(slot),
            q_tiles.index(slot), k_tiles.index(slot), v_tiles.index(slot), staging, slot * TILES, LATER, HEADS_FIRST,
        )  # fmt: skip

    count = 0
    for item in range(gl.program_id(0), items, programs):
        batch, head, lane = locate(item, heads, lanes, HEADS_FIRST)
        totals = log_sum_exp + (batch * heads + head).to(gl.int64) * n + first + lane * lane_step
        stage = count % STAGES
        if LATER or TILES > 2:
            # 0, but not known before the loop: addresses and masks that the compiler makes there would fill the registers.
            stage += count >> 30
        q_tile, k_tile, v_tile = q_tiles.index(stage), k_tiles.index(stage), v_tiles.index(stage)
        if LATER:
            place = gl.arange(0, ROWS, lane_layout)
            before = gl.load(totals + place * index_step, mask=place < length, other=float("-inf"))
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            old_totals.store(before)
        else:
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        for tile in gl.static_range(TILES):
            running_max = gl.full([64], float("-inf"), gl.float32, row_layout)
            weight = gl.zeros([64], gl.float32, row_layout)
            sums = gl.zeros([64, D], gl.float32, sum_layout)
            if LATER:
                staged = staging.index(stage * TILES + tile)
                running_max = old_totals.slice(tile * 64, 64).load(row_layout)
                weight = gl.where(running_max == float("-inf"), 0.0, 1.0)
                sums = staged.load(sum_layout).to(gl.float32)
            else:
                staged = staging.index((count * TILES + tile) % STAGED)
            zero = 0
            if LATER or TILES > 2:
                zero = (count + tile) >> 30
            for start in gl.static_range(0, tile * 64 + 64, MOST):
                sums, weight, running_max = take_keys(
                    sums, weight, running_max, q_tile, k_tile, v_tile, scale, zero,
                    tile * 64, start, MOST, NEAR, start == 0 and not LATER, layout, sum_layout,
                )  # fmt: skip
            nothing = weight == 0
            weight = gl.where(nothing, 1.0, weight)
            if not LATER:
                tma.store_wait(STAGED - 1)
            inverse = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, sum_layout))
            staged.store((sums * inverse[:, None]).to(dtype))
            fence_async_shared()
            copy_out(results, batch, head, lane, tile * 64, staged)
            total = gl.where(nothing, float("-inf"), running_max + gl.log2(weight))
            index = tile * 64 + gl.arange(0, 64, row_layout)
            gl.store(totals + index * index_step, total, mask=index < length)

        if LATER:  # The next output is copied to where this one is written from.
            tma.store_wait(0)
        fetch(
            queries, keys, values, results, item + STAGES * programs, items, heads, lanes, full.index(stage),
            q_tile, k_tile, v_tile, staging, stage * TILES, LATER, HEADS_FIRST,
        )  # fmt: skip
        count += 1
    tma.store_wait(0)


def launch_lane_forward(call: Forward, lanes: Lanes, near: int, accumulate: bool) -> Launch:
    """For the positions of these lanes."""
    q, k, v, output, lse = call.tensors
    batch, heads, n, d = q.shape
    rows = lane_rows(lanes, LONGEST)
    assert lse.is_contiguous()
    setting = lane_forward_settings(d, rows, accumulate)
    items = batch * heads * lanes.lanes
    arguments = (
        *(lane_box(x, lanes, rows) for x in (q, k, v)), lane_box(output, lanes, TILE), lse,
        heads, n, lanes.first, lanes.lanes, lanes.lane_stride, lanes.length, lanes.index_stride, items, call.scale,
    )  # fmt: skip
    constants = {
        "ROWS": rows, "D": d, "STAGES": setting.stages, "STAGED": setting.staged, "MOST": setting.most, "NEAR": near,
        "LATER": accumulate, "HEADS_FIRST": heads_side_by_side(q), "num_warps": 4, "maxnreg": setting.registers,
    }  # fmt: skip
    return Launch(lane_forward, min(items, processors(q.device) * setting.per_processor), arguments, constants)
