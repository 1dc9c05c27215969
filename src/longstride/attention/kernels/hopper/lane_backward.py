"""lane_backward: the gradients inside whole lanes, for Block and Column: dq, dk and dv in one go, nothing read twice.

The sums are those of backward.py in the folder above, and the way through the lanes is lane_forward's. Pairs lie keys down
and queries across, 64 by 64, so that the products for dv and dk take the weights and slopes from registers; only for dq do
the slopes pass through shared memory. Keys ascend: a tile's dq is complete when its own keys are through.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from longstride.attention.kernels.call import Backward
from longstride.attention.kernels.hopper.lane_boxes import (
    TILE,
    copy_in,
    copy_out,
    heads_side_by_side,
    lane_box,
    lane_rows,
    locate,
)
from longstride.attention.kernels.hopper.lane_settings import lane_backward_settings
from longstride.attention.kernels.hopper.pair_slopes import add_pairs, without_keys
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.settings import processors
from longstride.patterns.geometry import Lanes

MOST_NUMBERS = 64 * 128
"""The most numbers of a lane in one tensor: five such tiles share the memory of a program."""


@gluon.jit
def fetch(
    queries, keys, values, gradients, outputs, item, items, heads, lanes, full, q_tile, k_tile, v_tile, gradient_tile,
    output_tile, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """Starts to copy an item in, if there is such an item."""
    present = item < items
    batch, head, lane = locate(item, heads, lanes, HEADS_FIRST)
    mbarrier.expect(full, 5 * q_tile.shape[0] * q_tile.shape[1] * 2, pred=present)
    copy_in(outputs, batch, head, lane, 0, full, output_tile, present)
    copy_in(gradients, batch, head, lane, 0, full, gradient_tile, present)
    copy_in(queries, batch, head, lane, 0, full, q_tile, present)
    copy_in(keys, batch, head, lane, 0, full, k_tile, present)
    copy_in(values, batch, head, lane, 0, full, v_tile, present)


@gluon.jit
def replaced(values, INDEX: gl.constexpr, new):
    """The tuple with one entry changed."""
    result = ()
    for number in gl.static_range(len(values)):
        if number == INDEX:
            result = result + (new,)
        else:
            result = result + (values[number],)
    return result


@gluon.jit
def fetch_old(query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, NUMBER: gl.constexpr):
    """Starts to copy in the NUMBER-th tile of the gradients that are there, in the order in which they are written."""
    SLOT: gl.constexpr = NUMBER % staging.shape[0]
    mbarrier.expect(old_full.index(SLOT), staging.shape[1] * staging.shape[2] * 2)
    if NUMBER % 3 == 0:
        copy_in(query_slopes, batch, head, lane, NUMBER // 3 * 64, old_full.index(SLOT), staging.index(SLOT), True)
    elif NUMBER % 3 == 1:
        copy_in(key_slopes, batch, head, lane, NUMBER // 3 * 64, old_full.index(SLOT), staging.index(SLOT), True)
    else:
        copy_in(value_slopes, batch, head, lane, NUMBER // 3 * 64, old_full.index(SLOT), staging.index(SLOT), True)


@gluon.jit
def emit(
    value, query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, count,
    NUMBER: gl.constexpr, NUMBERS: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """Starts to write the NUMBER-th tile; LATER: added to the one that is there."""
    STAGED: gl.constexpr = staging.shape[0]
    staged = staging.index(NUMBER % STAGED)
    if LATER:
        if NUMBER > 0 and NUMBER + STAGED - 1 < NUMBERS:
            tma.store_wait(0)
            fetch_old(
                query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, NUMBER + STAGED - 1
            )  # fmt: skip
        mbarrier.wait(old_full.index(NUMBER % STAGED), (count * (NUMBERS // STAGED) + NUMBER // STAGED) & 1)
        value += staged.load(value.type.layout).to(gl.float32)
    else:
        tma.store_wait(STAGED - 1)
    staged.store(value.to(staged.dtype))
    fence_async_shared()
    if NUMBER % 3 == 0:
        copy_out(query_slopes, batch, head, lane, NUMBER // 3 * 64, staged)
    elif NUMBER % 3 == 1:
        copy_out(key_slopes, batch, head, lane, NUMBER // 3 * 64, staged)
    else:
        copy_out(value_slopes, batch, head, lane, NUMBER // 3 * 64, staged)


@gluon.jit
def lane_backward(
    queries, keys, values, gradients, outputs, query_slopes, key_slopes, value_slopes, log_sum_exp, numbers, row_length,
    heads, n, first, lanes, lane_step, length, index_step, items, scale, slope_scale,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr, PART: gl.constexpr,
    NEAR: gl.constexpr, LATER: gl.constexpr, HEADS_FIRST: gl.constexpr, HAND_ON: gl.constexpr,
):  # fmt: skip
    """LATER: adds to the gradients that are there. HAND_ON: fills `numbers` for later kernels, as numbers.py does."""
    dtype: gl.constexpr = queries.dtype
    TILES: gl.constexpr = ROWS // 64
    NUMBERS: gl.constexpr = 3 * TILES
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    gradient_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    output_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], tile_layout)
    slopes_tile = gl.allocate_shared_memory(dtype, [64, 64], slopes_layout)
    staging = gl.allocate_shared_memory(dtype, [STAGED, 64, D], tile_layout)
    totals = gl.allocate_shared_memory(gl.float32, [ROWS], vector_layout)
    means = gl.allocate_shared_memory(gl.float32, [ROWS], vector_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    old_full = gl.allocate_shared_memory(gl.int64, [STAGED, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(STAGED):
        mbarrier.init(old_full.index(slot), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    for slot in gl.static_range(STAGES):
        fetch(
            queries, keys, values, gradients, outputs, gl.program_id(0) + slot * programs, items, heads, lanes,
            full.index(slot), q_tiles.index(slot), k_tiles.index(slot), v_tiles.index(slot), gradient_tiles.index(slot),
            output_tiles.index(slot), HEADS_FIRST,
        )  # fmt: skip

    count = 0
    index = gl.arange(0, ROWS, row_layout)
    for item in range(gl.program_id(0), items, programs):
        batch, head, lane = locate(item, heads, lanes, HEADS_FIRST)
        places = log_sum_exp + (batch * heads + head).to(gl.int64) * n + first + lane * lane_step
        total = without_keys(gl.load(places + index * index_step, mask=index < length, other=float("inf")))
        if LATER:
            tma.store_wait(0)
            for number in gl.static_range(STAGED):
                fetch_old(query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, number)
        # A count >> 30 is 0, but not known before the loop: addresses and masks made there would fill the registers.
        stage = count % STAGES + (count >> 30)
        q_tile, k_tile, v_tile = q_tiles.index(stage), k_tiles.index(stage), v_tiles.index(stage)
        gradient_tile, output_tile = gradient_tiles.index(stage), output_tiles.index(stage)
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        totals.store(total)
        for part in gl.static_range(TILES):
            slope = gradient_tile.slice(part * 64, 64).load(load_layout).to(gl.float32)
            result = output_tile.slice(part * 64, 64).load(load_layout).to(gl.float32)
            means.slice(part * 64, 64).store(gl.sum(slope * result, 1))
        if HAND_ON:
            place = numbers + (batch * heads + head).to(gl.int64) * 2 * row_length + first + lane * lane_step
            place += index * index_step
            gl.store(place, total, mask=index < length)
            gl.store(place + row_length, means.load(row_layout), mask=index < length)

        dq_sums = ()
        for _ in gl.static_range(TILES):
            dq_sums = dq_sums + (gl.zeros([64, D], gl.float32, sum_layout),)
        for key in gl.static_range(TILES):
            dk_sum = gl.zeros([64, D], gl.float32, sum_layout)
            dv_sum = gl.zeros([64, D], gl.float32, sum_layout)
            for query in gl.static_range(key, TILES):
                dq_sum, dk_sum, dv_sum = add_pairs(
                    dq_sums[query], dk_sum, dv_sum, q_tile.slice(query * 64, 64), k_tile.slice(key * 64, 64),
                    v_tile.slice(key * 64, 64), gradient_tile.slice(query * 64, 64), slopes_tile,
                    totals.slice(query * 64, 64), means.slice(query * 64, 64), scale, (count + key) >> 30,
                    (query - key) * 64, NEAR, ROWS, PART, key == 0, query == key, sum_layout,
                )  # fmt: skip
                dq_sums = replaced(dq_sums, query, dq_sum)
                if query == key:
                    emit(
                        dq_sum * slope_scale, query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging,
                        count, 3 * key, NUMBERS, LATER,
                    )  # fmt: skip
            emit(
                dk_sum * slope_scale, query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, count,
                3 * key + 1, NUMBERS, LATER,
            )  # fmt: skip
            emit(
                dv_sum, query_slopes, key_slopes, value_slopes, batch, head, lane, old_full, staging, count,
                3 * key + 2, NUMBERS, LATER,
            )  # fmt: skip

        fetch(
            queries, keys, values, gradients, outputs, item + STAGES * programs, items, heads, lanes, full.index(stage),
            q_tile, k_tile, v_tile, gradient_tile, output_tile, HEADS_FIRST,
        )  # fmt: skip
        count += 1
    tma.store_wait(0)


def launch_lane_backward(call: Backward, lanes: Lanes, near: int, accumulate: bool, numbers: Tensor | None = None) -> Launch:
    """For the positions of these lanes.

    numbers: [batch * heads, 2, at least n], filled with what other kernels need of these positions.
    """
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    batch, heads, n, d = q.shape
    rows = lane_rows(lanes, MOST_NUMBERS // d)
    assert lse.is_contiguous()
    setting = lane_backward_settings(d, rows, accumulate)
    items = batch * heads * lanes.lanes
    arguments = (
        *(lane_box(x, lanes, rows) for x in (q, k, v, d_output, output)),
        *(lane_box(x, lanes, TILE) for x in (dq, dk, dv)), lse,
        lse if numbers is None else numbers, 0 if numbers is None else numbers.shape[2],
        heads, n, lanes.first, lanes.lanes, lanes.lane_stride, lanes.length, lanes.index_stride, items, *call.scales,
    )  # fmt: skip
    constants = {
        "ROWS": rows, "D": d, "STAGES": setting.stages, "STAGED": setting.staged, "PART": setting.part, "NEAR": near,
        "LATER": accumulate, "HEADS_FIRST": heads_side_by_side(q), "HAND_ON": numbers is not None, "num_warps": 4,
        "maxnreg": setting.registers,
    }  # fmt: skip
    return Launch(lane_backward, min(items, processors(q.device) * setting.per_processor), arguments, constants)
