"""lane_forward: attention inside whole lanes, for Block and Column, as fast as memory gives the tiles.

A program is one warpgroup with `stages` lanes in shared memory. It computes one while TMA copies the next in and results
out, and several programs share a multiprocessor. All keys of 64 queries are at hand, up to 128 at a time; up to that length
the softmax is taken at once. Scores are in bits: `scale` includes log2(e).
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

from longstride.attention.kernels.hopper import lane_tiles
from longstride.attention.kernels.hopper.ring import make_barriers, make_panels
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout


@gluon.jit
def fetch_item(
    matrices, tiles, output, staging, first_staged, item, work, full,
    HEADS_FIRST: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Starts to copy an item in, if there is such an item; ACCUMULATE: with the output of an earlier pass."""
    present = item < work.items
    batch, head, lane = lane_tiles.locate_lane(item, work, HEADS_FIRST)
    lane_tiles.expect_tiles(full, tiles, present, len(tiles[2]) if ACCUMULATE else 0)
    lane_tiles.copy_all(matrices, (batch, head, lane, 0), full, tiles, present)
    if ACCUMULATE:
        for part in gl.static_range(tiles[0][0].shape[0] // ROWS):
            staged = lane_tiles.panels_at(staging, first_staged + part)
            lane_tiles.copy_in(output, (batch, head, lane, part * ROWS), full, staged, present)


@gluon.jit
def take_keys(state, tiles, scale, zero, ROW: gl.constexpr, START: gl.constexpr, FIRST: gl.constexpr, TILES: gl.constexpr):
    """The state of the 64 queries from ROW on after up to TILES.part keys from START on: running maximum, weight and
    weighted sums of values, in panels. tiles: of q, k and v. FIRST: there is no state before these keys.
    """
    running_max, weight, sums = state
    q_tile, k_tile, v_tile = tiles
    TWO: gl.constexpr = TILES.part == 2 * ROWS and ROW > START
    FAR: gl.constexpr = q_tile[0].shape[0]
    zeros = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS))
    query = q_tile[0].slice(ROW, ROWS)
    key = k_tile[0].slice(START, ROWS)
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TWO:
        key = k_tile[0].slice(START + ROWS, ROWS)
        others = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, others = warpgroup_mma_wait(0, deps=(scores, others))
        scores = lane_tiles.mask_distances(scores, zero, ROW - START, TILES.near, FAR)
        others = lane_tiles.mask_distances(others, zero, ROW - START - ROWS, TILES.near, FAR)
        largest = gl.max(gl.maximum(scores, others), 1) * scale
    else:
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = lane_tiles.mask_distances(scores, zero, ROW - START, TILES.near, FAR)
        largest = gl.max(scores, 1) * scale
    if not FIRST:
        largest = gl.maximum(largest, running_max)
    finite = gl.where(largest == float("-inf"), 0.0, largest)
    weights = gl.exp2(scores * scale - finite[:, None])
    if not FIRST:
        shrink = gl.exp2(running_max - finite)
        sums = lane_tiles.scale_rows(sums, shrink)
    sums = lane_tiles.add_products(weights, lane_tiles.rows_of(v_tile, START), sums, not FIRST)
    if TWO:
        more = gl.exp2(others * scale - finite[:, None])
        sums = lane_tiles.add_products(more, lane_tiles.rows_of(v_tile, START + ROWS), sums, True)
        weights += more
    added = gl.sum(weights, 1)
    if not FIRST:
        added += weight * shrink
    return largest, added, lane_tiles.wait_for(sums)


@gluon.jit
def lane_forward(q, k, v, output, lse, work, scale, TILES: gl.constexpr, ACCUMULATE: gl.constexpr):
    """q, k, v, output: tensor descriptors. ACCUMULATE: continues from the output and lse of an earlier pass."""
    dtype: gl.constexpr = q.dtype
    LENGTH: gl.constexpr = q.block_type.shape[3]
    D: gl.constexpr = q.block_type.shape[4]
    STAGES: gl.constexpr = TILES.stages
    COUNT: gl.constexpr = LENGTH // ROWS
    sum_layout: gl.constexpr = mma_layout(D)
    score_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(ROWS))
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_tiles = make_panels(dtype, STAGES, LENGTH, D, 1)
    k_tiles = make_panels(dtype, STAGES, LENGTH, D, 1)
    v_tiles = make_panels(dtype, STAGES, LENGTH, D, TILES.panels)
    staging = make_panels(dtype, STAGES * COUNT if ACCUMULATE else TILES.staged, ROWS, D, TILES.panels)
    old_lse = gl.allocate_shared_memory(gl.float32, [LENGTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = make_barriers(STAGES)
    fence_async_shared()
    programs = gl.num_programs(0)
    for slot in gl.static_range(STAGES):
        fetch_item(
            (q, k, v), lane_tiles.tiles_at((q_tiles, k_tiles, v_tiles), slot), output, staging, slot * COUNT,
            gl.program_id(0) + slot * programs, work, full.index(slot), TILES.heads_first, ACCUMULATE,
        )  # fmt: skip

    count = 0
    for item in range(gl.program_id(0), work.items, programs):
        batch, head, lane = lane_tiles.locate_lane(item, work, TILES.heads_first)
        lse_lane = lse + (batch * work.heads + head).to(gl.int64) * work.n + work.first + lane * work.lane_stride
        stage = count % STAGES
        if ACCUMULATE or COUNT > 2:
            # 0, but not known before the loop: addresses and masks that the compiler makes there would fill the registers.
            stage += count >> 30
        tiles = lane_tiles.tiles_at((q_tiles, k_tiles, v_tiles), stage)
        if ACCUMULATE:
            index = gl.arange(0, LENGTH, lane_layout)
            before = gl.load(lse_lane + index * work.index_stride, mask=index < work.length, other=float("-inf"))
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            old_lse.store(before)
        else:
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        for tile in gl.static_range(COUNT):
            running_max = gl.full([ROWS], float("-inf"), gl.float32, score_rows)
            weight = gl.zeros([ROWS], gl.float32, score_rows)
            sums = lane_tiles.empty_sums(TILES.panels, D, sum_layout)
            if ACCUMULATE:
                staged = lane_tiles.panels_at(staging, stage * COUNT + tile)
                running_max = old_lse.slice(tile * ROWS, ROWS).load(score_rows)
                weight = gl.where(running_max == float("-inf"), 0.0, 1.0)
                sums = [panel.load(sum_layout).to(gl.float32) for panel in staged]
            else:
                staged = lane_tiles.panels_at(staging, (count * COUNT + tile) % TILES.staged)
            zero = 0
            if ACCUMULATE or COUNT > 2:
                zero = (count + tile) >> 30
            for start in gl.static_range(0, (tile + 1) * ROWS, TILES.part):
                running_max, weight, sums = take_keys(
                    (running_max, weight, sums), tiles, scale, zero, tile * ROWS, start, start == 0 and not ACCUMULATE, TILES
                )  # fmt: skip
            nothing = weight == 0
            weight = gl.where(nothing, 1.0, weight)
            if not ACCUMULATE:
                tma.store_wait((TILES.staged - 1) * TILES.panels)
            sums = lane_tiles.scale_rows(sums, 1.0 / weight)
            for panel in gl.static_range(TILES.panels):
                staged[panel].store(sums[panel].to(dtype))
            fence_async_shared()
            lane_tiles.copy_out(output, (batch, head, lane, tile * ROWS), staged)
            total = gl.where(nothing, float("-inf"), running_max + gl.log2(weight))
            index = tile * ROWS + gl.arange(0, ROWS, score_rows)
            gl.store(lse_lane + index * work.index_stride, total, mask=index < work.length)

        if ACCUMULATE:  # The next output is copied to where this one is written from.
            tma.store_wait(0)
        fetch_item(
            (q, k, v), tiles, output, staging, stage * COUNT,
            item + STAGES * programs, work, full.index(stage), TILES.heads_first, ACCUMULATE,
        )  # fmt: skip
        count += 1
    tma.store_wait(0)
