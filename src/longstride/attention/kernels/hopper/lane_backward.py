"""lane_backward: the gradients inside whole lanes, for Block and Column: dq, dk and dv in one kernel, nothing read twice.

The sums are those of backward.py in the folder above, and the way through the lanes is lane_forward's, with one lane in
shared memory at a time: the next is copied in while gradients are on their way out. Pairs lie keys down and queries across,
64 by 64 (pair_gradients.py). Keys ascend: a tile's dq is complete when its own keys are through.

Gradients of an earlier pass are copied to where the sums are written from, some of them to where the output was, which is
needed only for delta.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from longstride.attention.kernels.hopper import lane_tiles
from longstride.attention.kernels.hopper.pair_gradients import QueryTile, add_pairs
from longstride.attention.kernels.hopper.ring import make_barriers, make_panels, make_tiles
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout, row_layout
from longstride.attention.kernels.primitives import without_keys


class StoreOrder(NamedTuple):
    """For each ROWS keys an item writes tiles of dq, dk and the panels of dv. Compiled in, as one constexpr."""

    stores: Any  # tiles that an item writes
    slots: Any  # tiles in shared memory that these are written from, in turn
    panels: Any


class GradientTiles(NamedTuple):
    """Where the gradients of an item are written."""

    gradients: Any  # tensor descriptors of dq, dk and dv
    batch: Any
    head: Any
    lane: Any
    count: Any  # items of the program before this one
    staging: Any  # the first slots
    output: Any  # panels of the output, which is needed only for delta; then they are the other slots
    old_full: Any  # mbarriers of the slots: a gradient of an earlier pass is there


@gluon.constexpr_function
def order_stores(count, panels, staged, accumulate):
    """For `count` tiles of keys. Where the output was there is room for gradients of an earlier pass."""
    stores = (2 + panels) * count
    slots = min(stores, staged + count * panels) if accumulate else staged
    return StoreOrder(gl.constexpr(stores), gl.constexpr(slots), gl.constexpr(panels))


@gluon.constexpr_function
def locate_store(store, panels):
    """Which gradient a store writes, which panel, and its first row."""
    kind = store % (2 + panels)
    return min(kind, 2), max(kind - 2, 0), store // (2 + panels) * ROWS.value


@gluon.constexpr_function
def stores_after(stores, slots, staged):
    """How many tiles are written after the last one that is not in `staging`."""
    return min(after for after in range(stores) if (stores - 1 - after) % slots >= staged)


@gluon.jit
def fetch_lane(descriptors, tiles, item, work, full, HEADS_FIRST: gl.constexpr):
    """Starts to copy an item in, if there is such an item: d_output, q, k and v. `fetch_output` completes it."""
    present = item < work.items
    batch, head, lane = lane_tiles.locate_lane(item, work, HEADS_FIRST)
    lane_tiles.expect_tiles(full, tiles, present, len(tiles[0]))
    lane_tiles.copy_all(descriptors, (batch, head, lane, 0), full, tiles, present)


@gluon.jit
def fetch_output(output, output_tile, item, work, full, HEADS_FIRST: gl.constexpr):
    batch, head, lane = lane_tiles.locate_lane(item, work, HEADS_FIRST)
    lane_tiles.copy_in(output, (batch, head, lane, 0), full, output_tile, item < work.items)


@gluon.jit
def slot_tile(results, SLOT: gl.constexpr):
    """The tile of a slot: in `staging`, or ROWS rows of a panel of the output."""
    OTHER: gl.constexpr = SLOT - results.staging.shape[0]
    if OTHER < 0:
        return results.staging.index(SLOT)
    else:
        panel = results.output[OTHER % len(results.output)].index(results.count >> 30)
        parts = panel._reinterpret(panel.dtype, [panel.shape[0] // ROWS, ROWS, panel.shape[1]], results.staging.layout)
        return parts.index(OTHER // len(results.output))


@gluon.jit
def fetch_old(results, STORE: gl.constexpr, ORDER: gl.constexpr):
    """Starts to copy in what an earlier pass wrote where a store will write."""
    SLOT: gl.constexpr = STORE % ORDER.slots
    full = results.old_full.index(SLOT)
    mbarrier.expect(full, ROWS * results.staging.shape[2] * 2)
    PLACE: gl.constexpr = locate_store(STORE, ORDER.panels)
    place = results.batch, results.head, results.lane, PLACE[2]
    lane_tiles.copy_in(results.gradients[PLACE[0]], place, full, (slot_tile(results, SLOT),), True, PLACE[1])


@gluon.jit
def store_tile(value, results, STORE: gl.constexpr, ORDER: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Starts to write a tile; ACCUMULATE: added to that of an earlier pass."""
    SLOTS: gl.constexpr = ORDER.slots
    staged = slot_tile(results, STORE % SLOTS)
    if ACCUMULATE:
        if STORE > 0 and ORDER.stores >= STORE + SLOTS:
            tma.store_wait(0)
            fetch_old(results, STORE + SLOTS - 1, ORDER)
        TIMES: gl.constexpr = (ORDER.stores - 1 - STORE % SLOTS) // SLOTS + 1  # that an item uses the slot
        mbarrier.wait(results.old_full.index(STORE % SLOTS), (results.count * TIMES + STORE // SLOTS) & 1)
        value += staged.load(value.type.layout).to(gl.float32)
    else:
        tma.store_wait(SLOTS - 1)
    staged.store(value.to(staged.dtype))
    fence_async_shared()
    PLACE: gl.constexpr = locate_store(STORE, ORDER.panels)
    place = results.batch, results.head, results.lane, PLACE[2]
    lane_tiles.copy_out(results.gradients[PLACE[0]], place, (staged,), PLACE[1])


@gluon.jit
def lane_backward(
    q, k, v, d_output, output, dq, dk, dv, lse, row_stats, work, scales,
    TILES: gl.constexpr, ACCUMULATE: gl.constexpr, STORE_STATS: gl.constexpr,
):  # fmt: skip
    """q to dv: tensor descriptors. ACCUMULATE: adds to the gradients of an earlier pass.

    STORE_STATS: writes `row_stats` for later kernels, as backward_row_stats does.
    """
    dtype: gl.constexpr = q.dtype
    LENGTH: gl.constexpr = q.block_type.shape[3]
    D: gl.constexpr = q.block_type.shape[4]
    COUNT: gl.constexpr = LENGTH // ROWS
    PANELS: gl.constexpr = TILES.panels
    ORDER: gl.constexpr = order_stores(COUNT, PANELS, TILES.staged, ACCUMULATE)
    OVER_OUTPUT: gl.constexpr = TILES.staged < ORDER.slots
    sum_layout: gl.constexpr = mma_layout(D)
    load_layout: gl.constexpr = row_layout(D)
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = make_panels(dtype, 1, LENGTH, D, 1)
    k_tiles = make_panels(dtype, 1, LENGTH, D, 1)
    v_tiles = make_panels(dtype, 1, LENGTH, D, PANELS)
    d_output_tiles = make_panels(dtype, 1, LENGTH, D, PANELS)
    output_tiles = make_panels(dtype, 1, LENGTH, D, PANELS)
    d_scores_tile = make_tiles(dtype, 1, ROWS, ROWS).index(0)
    staging = make_tiles(dtype, TILES.staged, ROWS, D)
    lse_rows = gl.allocate_shared_memory(gl.float32, [LENGTH], vector_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [LENGTH], vector_layout)
    full = make_barriers(1)
    old_full = make_barriers(ORDER.slots)
    fence_async_shared()
    programs = gl.num_programs(0)
    tiles = lane_tiles.tiles_at((d_output_tiles, q_tiles, k_tiles, v_tiles), 0)
    fetch_lane((d_output, q, k, v), tiles, gl.program_id(0), work, full.index(0), TILES.heads_first)
    fetch_output(output, lane_tiles.panels_at(output_tiles, 0), gl.program_id(0), work, full.index(0), TILES.heads_first)

    count = 0
    index = gl.arange(0, LENGTH, lane_layout)
    for item in range(gl.program_id(0), work.items, programs):
        batch, head, lane = lane_tiles.locate_lane(item, work, TILES.heads_first)
        pointers = lse + (batch * work.heads + head).to(gl.int64) * work.n + work.first + lane * work.lane_stride
        valid = index < work.length
        own_lse = without_keys(gl.load(pointers + index * work.index_stride, mask=valid, other=float("inf")))
        results = GradientTiles((dq, dk, dv), batch, head, lane, count, staging, output_tiles, old_full)
        if ACCUMULATE:
            tma.store_wait(0)
            for store in gl.static_range(TILES.staged):
                fetch_old(results, store, ORDER)
        # A count >> 30 is 0, but not known before the loop: addresses and masks made there would fill the registers.
        output_tile = lane_tiles.panels_at(output_tiles, count >> 30)
        tiles = lane_tiles.tiles_at((d_output_tiles, q_tiles, k_tiles, v_tiles), count >> 30)
        d_output_tile, q_tile, k_tile, v_tile = tiles
        mbarrier.wait(full.index(0), count & 1)
        lse_rows.store(own_lse)
        for part in gl.static_range(COUNT):
            d_outputs = lane_tiles.load_panels(lane_tiles.rows_of(d_output_tile, part * ROWS), load_layout)
            outputs = lane_tiles.load_panels(lane_tiles.rows_of(output_tile, part * ROWS), load_layout)
            delta_rows.slice(part * ROWS, ROWS).store(lane_tiles.row_products(d_outputs, outputs))
        for store in gl.static_range(TILES.staged, ORDER.slots):
            fetch_old(results, store, ORDER)
        if STORE_STATS:
            pointers = row_stats.data + (batch * work.heads + head).to(gl.int64) * 2 * row_stats.row
            pointers = pointers + work.first + lane * work.lane_stride + index * work.index_stride
            gl.store(pointers, own_lse, mask=valid)
            gl.store(pointers + row_stats.row, delta_rows.load(lane_layout), mask=valid)

        dq_sums = lane_tiles.empty_sums(COUNT, D, sum_layout)
        for key in gl.static_range(COUNT):
            dk_sum = gl.zeros([ROWS, D], gl.float32, sum_layout)
            dv_sum = lane_tiles.empty_sums(PANELS, D, sum_layout)
            for query in gl.static_range(key, COUNT):
                queries = QueryTile(
                    q_tile[0].slice(query * ROWS, ROWS), lane_tiles.rows_of(d_output_tile, query * ROWS),
                    lse_rows.slice(query * ROWS, ROWS), delta_rows.slice(query * ROWS, ROWS),
                )  # fmt: skip
                keys = k_tile[0].slice(key * ROWS, ROWS), lane_tiles.rows_of(v_tile, key * ROWS)
                dq_sum, dk_sum, dv_sum = add_pairs(
                    (dq_sums[query], dk_sum, dv_sum), queries, keys, d_scores_tile, scales.scores, (count + key) >> 30,
                    (query - key) * ROWS, TILES.near, LENGTH, TILES.part, key == 0, query == key,
                )  # fmt: skip
                dq_sums = dq_sums[:query] + (dq_sum,) + dq_sums[query + 1 :]
                if key == COUNT - 1:  # All tiles have been read.
                    fetch_lane((d_output, q, k, v), tiles, item + programs, work, full.index(0), TILES.heads_first)
                    if not OVER_OUTPUT:
                        fetch_output(output, output_tile, item + programs, work, full.index(0), TILES.heads_first)
                if query == key:
                    store_tile(dq_sum * scales.gradients, results, (2 + PANELS) * key, ORDER, ACCUMULATE)
            store_tile(dk_sum * scales.gradients, results, (2 + PANELS) * key + 1, ORDER, ACCUMULATE)
            for panel in gl.static_range(PANELS):
                store_tile(dv_sum[panel], results, (2 + PANELS) * key + 2 + panel, ORDER, ACCUMULATE)
        if OVER_OUTPUT:
            tma.store_wait(stores_after(ORDER.stores, ORDER.slots, TILES.staged))
            fetch_output(output, output_tile, item + programs, work, full.index(0), TILES.heads_first)
        count += 1
    tma.store_wait(0)
