"""past_forward: all of the own lane so far, and summary cells of the lanes before it, one pattern in all heads, for Hopper.

Three groups of four warps have 64 queries each, one after the other, of the same lane or of the next: they see nearly the
same keys, which one warp copies into shared memory for all of them, the cells of several lanes as one box. A tile of 128
keys is computed as two halves: the product of one half is under way while the softmax of the other is taken. Tiles that are
seen whole have a loop of their own, without masks.
Programs are persistent: the next queries and keys are copied while results are written.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper.ring import beside, item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import take_softmax
from longstride.attention.kernels.primitives import LOWEST

GROUPS = gl.constexpr(3)
TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Keys of a tile; keys of half of it, and queries of a group."""
STAGES = gl.constexpr(4)


@gluon.jit
def locate(item, all_heads, heads, units):
    """batch, head and the first of the item's units of 64 queries. Items with most work come first."""
    head = item % all_heads
    place = (units + GROUPS - 1) // GROUPS - 1 - item // all_heads
    return head // heads, head % heads, place * GROUPS


@gluon.jit
def last_lane(unit, units, in_lane):
    """The lane of an item's last unit; the last item may have fewer units than others."""
    return gl.minimum(unit + GROUPS - 1, units - 1) // in_lane


@gluon.jit
def cell_tiles(lane, cells):
    """How many tiles of cells there are before a lane."""
    return (lane * cells + TILE - 1) // TILE


@gluon.jit
def own_tiles(lane, unit, units, in_lane, near):
    """How many tiles of a lane's own keys the item's queries see, at least one."""
    end = gl.minimum(gl.minimum(unit + GROUPS, units) - lane * in_lane, in_lane)
    return (end * HALF - 1 - near) // TILE + 1


@gluon.jit
def copy_tiles(
    q_view, k_view, v_view, k_cells, v_cells, queries, keys, values, first_cell, items, all_heads, heads, units, in_lane,
    row_shift, inner_shift, near, cells, CELLS: gl.constexpr,
):  # fmt: skip
    """The producer."""
    count = 0
    for turn in range(rounds(items)):
        batch, head, unit = locate(item_of_round(turn), all_heads, heads, units)
        for group in gl.static_range(GROUPS):
            mine = gl.minimum(unit + group, units - 1)
            lane = mine // in_lane
            row = lane * row_shift + mine % in_lane * HALF
            queries.fill(GROUPS * turn + group, q_view, [batch, head, row, lane * inner_shift, 0])
        last = last_lane(unit, units, in_lane)
        if CELLS > 0:
            inside = gl.load(first_cell + head)
            for tile in range(cell_tiles(last, cells)):
                place = [batch, head, tile * TILE // CELLS, inside + tile * TILE % CELLS, 0]
                keys.begin(count, keys.bytes + values.bytes)
                keys.copy(count, k_cells, place)
                values.copy(count, v_cells, place)
                count += 1
        for lane in range(unit // in_lane, last + 1):
            for tile in range(own_tiles(lane, unit, units, in_lane, near)):
                place = [batch, head, lane * row_shift + tile * TILE, lane * inner_shift, 0]
                keys.begin(count, keys.bytes + values.bytes)
                keys.copy(count, k_view, place)
                values.copy(count, v_view, place)
                count += 1


@gluon.jit
def skip(keys, begin, end):
    """Tiles that other groups need."""
    for turn in range(begin, end):
        keys.wait_full(turn)
        keys.release(turn)


@gluon.jit
def half_tile(ring, turn, half):
    STAGES: gl.constexpr = ring.tiles.shape[0]
    WIDTH: gl.constexpr = ring.tiles.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDTH], ring.tiles.dtype)
    halves = ring.tiles._reinterpret(ring.tiles.dtype, [2 * STAGES, HALF, WIDTH], layout)
    return halves.index(turn % STAGES * 2 + half)


@gluon.jit
def score(query, keys, turn, half):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    zeros = gl.zeros([HALF, HALF], gl.float32, layout)
    return warpgroup_mma(query, half_tile(keys, turn, half).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def by_sums(of_rows, sums):
    layout: gl.constexpr = sums.type.layout
    return gl.convert_layout(of_rows, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]


@gluon.jit
def add_values(weights, shrink, sums, values, turn, half):
    sum_layout: gl.constexpr = sums.type.layout
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    operand = gl.convert_layout(weights.to(values.tiles.dtype), layout)
    return warpgroup_mma(operand, half_tile(values, turn, half), sums * by_sums(shrink, sums), is_async=True)


@gluon.jit
def take_tile(running_max, weight, sums, query, keys, values, turn, scale):
    """A tile that is seen whole."""
    keys.wait_full(turn)
    left = score(query, keys, turn, 0)
    right = score(query, keys, turn, 1)
    scores = warpgroup_mma_wait(1, deps=(left,))
    weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
    adding = add_values(weights, shrink, sums, values, turn, 0)
    scores = warpgroup_mma_wait(1, deps=(right,))
    weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
    sums = warpgroup_mma_wait(0, deps=(adding,))
    adding = add_values(weights, shrink, sums, values, turn, 1)
    sums = warpgroup_mma_wait(0, deps=(adding,))
    keys.release(turn)
    return running_max, weight, sums


@gluon.jit
def hide(scores, start, is_cell, before, first_row, near, inside, own_cells, OWN: gl.constexpr):
    """-inf for cells that are not before the lane, and for keys of it that are not `near` positions back."""
    layout: gl.constexpr = scores.type.layout
    column = start + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    last = gl.where(is_cell, before - 1, row - near)
    seen = column[None, :] <= last[:, None]
    if not OWN:
        seen = seen & (is_cell | ((column >= inside) & (column < inside + own_cells)))[None, :]
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def take_half(
    running_max, weight, sums, query, keys, values, turn, half, is_last, start, is_cell, before, first_row, near, inside,
    own_cells, scale, OWN: gl.constexpr,
):  # fmt: skip
    """One half of a tile, with masks; `is_last`: of this tile nothing more is needed."""
    keys.wait_full(turn)
    scores = warpgroup_mma_wait(0, deps=(score(query, keys, turn, half),))
    scores = hide(scores, start, is_cell, before, first_row, near, inside, own_cells, OWN)
    weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
    sums = warpgroup_mma_wait(0, deps=(add_values(weights, shrink, sums, values, turn, half),))
    mbarrier.arrive(keys.empty.index(turn % keys.stages), count=1, pred=is_last)
    return running_max, weight, sums


@gluon.jit
def compute_tiles(
    group: gl.constexpr, queries, keys, values, output, log_sum_exp, first_cell, output_batch, output_head, output_row,
    items, all_heads, heads, units, in_lane, lane_shift, step, limit, near, cells, own_cells, n, scale,
    D_V: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """A group, for its 64 queries of an item."""
    dtype: gl.constexpr = values.tiles.dtype
    WIDTH_V: gl.constexpr = values.tiles.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    query_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_layout, k_width=2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH_V, WIDTH_V // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    count = 0
    for turn in range(rounds(items)):
        batch, head, unit = locate(item_of_round(turn), all_heads, heads, units)
        mine = gl.minimum(unit + group, units - 1)
        lane = mine // in_lane
        first_row = mine % in_lane * HALF
        last = last_lane(unit, units, in_lane)
        total = cell_tiles(last, cells)
        own_turn = total
        for other in range(unit // in_lane, last + 1):
            own_turn = gl.where(other == lane, total, own_turn)
            total += own_tiles(other, unit, units, in_lane, near)
        before = lane * cells
        inside = 0
        if not OWN:
            inside = gl.load(first_cell + head)
        lane_start = lane * lane_shift
        # A group past the last unit does the work of the last one once more, and keeps it to itself.
        rows = gl.where(unit + group < units, gl.minimum(limit, (n - 1 - lane_start) // step + 1), 0)
        result = output + batch.to(gl.int64) * output_batch + head.to(gl.int64) * output_head
        totals = log_sum_exp + (batch * heads + head).to(gl.int64) * n + lane_start

        by_score = first_row + gl.arange(0, HALF, row_layout)
        running_max = gl.full([HALF], LOWEST, gl.float32, row_layout)
        weight = gl.zeros([HALF], gl.float32, row_layout)
        sums = gl.zeros([HALF, WIDTH_V], gl.float32, sum_layout)
        if LATER:
            by_sum = first_row + gl.arange(0, HALF, gl.SliceLayout(1, sum_layout))
            column = gl.arange(0, WIDTH_V, gl.SliceLayout(0, sum_layout))
            place = (lane_start + by_sum * step).to(gl.int64)[:, None] * output_row + column[None, :]
            there = (by_sum < rows)[:, None] & (column < D_V)[None, :]
            earlier = gl.load(totals + by_score * step, mask=by_score < rows, other=float("-inf"))
            weight = gl.where(earlier == float("-inf"), 0.0, 1.0)
            running_max = gl.where(earlier == float("-inf"), LOWEST, earlier)
            sums = gl.load(result + place, mask=there, other=0.0).to(gl.float32)

        query = queries.wait_full(GROUPS * turn + group).load(query_layout)
        queries.release(GROUPS * turn + group)
        done = 0
        for part in range(0 if CELLS > 0 else 1, 2):  # the cells, and the own lane
            is_cell = part == 0
            begin = gl.where(is_cell, 0, own_turn)
            # Keys that all of the group's queries see, and those that any of them sees.
            all_see = gl.where(is_cell, before, gl.maximum(0, first_row - near + 1))
            any_sees = gl.where(is_cell, before, first_row + HALF - near)
            if not OWN:
                all_see = gl.where(is_cell, before, 0)
            whole = all_see // TILE
            skip(keys, count + done, count + begin)
            for tile in range(whole):
                running_max, weight, sums = take_tile(
                    running_max, weight, sums, query, keys, values, count + begin + tile, scale
                )  # fmt: skip
            done = begin + whole
            halves = (any_sees + HALF - 1) // HALF
            for half in range(2 * whole, halves):
                is_last = (half % 2 == 1) | (half == halves - 1)
                running_max, weight, sums = take_half(
                    running_max, weight, sums, query, keys, values, count + begin + half // 2, half % 2, is_last,
                    half * HALF, is_cell, before, first_row, near, inside, own_cells, scale, OWN,
                )  # fmt: skip
                done += is_last.to(gl.int32)
        skip(keys, count + done, count + total)
        count += total

        nothing = weight == 0
        weight = gl.where(nothing, 1.0, weight)
        final = sums * by_sums(1.0 / weight, sums)
        row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, WIDTH_V, gl.SliceLayout(0, store_layout))
        place = (lane_start + row * step).to(gl.int64)[:, None] * output_row + column[None, :]
        there = (row < rows)[:, None] & (column < D_V)[None, :]
        gl.store(result + place, gl.convert_layout(final.to(dtype), store_layout), mask=there)
        bits = gl.where(nothing, float("-inf"), running_max + gl.log2(weight))
        gl.store(totals + by_score * step, bits, mask=by_score < rows)


@gluon.jit
def past_forward(
    q_view, k_view, v_view, k_cells, v_cells, output, log_sum_exp, first_cell, output_batch, output_head, output_row, items,
    all_heads, heads, units, in_lane, lane_shift, step, row_shift, inner_shift, limit, near, cells, own_cells, n, scale,
    D_V: gl.constexpr, CELLS: gl.constexpr, OWN: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """A lane has up to `limit` positions, in units of 64 queries, `in_lane` of them; later lanes see `cells` of it."""
    dtype: gl.constexpr = q_view.dtype
    queries = make_ring(dtype, 2 * GROUPS, HALF, q_view.block_type.shape[4], 1)
    keys = make_ring(dtype, STAGES, TILE, k_view.block_type.shape[4], GROUPS)
    values = beside(keys, dtype, TILE, v_view.block_type.shape[4])
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_tiles, (
                gl.constexpr(0), queries, keys, values, output, log_sum_exp, first_cell, output_batch, output_head,
                output_row, items, all_heads, heads, units, in_lane, lane_shift, step, limit, near, cells, own_cells, n,
                scale, D_V, CELLS, OWN, LATER,
            )),
            (compute_tiles, (
                gl.constexpr(1), queries, keys, values, output, log_sum_exp, first_cell, output_batch, output_head,
                output_row, items, all_heads, heads, units, in_lane, lane_shift, step, limit, near, cells, own_cells, n,
                scale, D_V, CELLS, OWN, LATER,
            )),
            (compute_tiles, (
                gl.constexpr(2), queries, keys, values, output, log_sum_exp, first_cell, output_batch, output_head,
                output_row, items, all_heads, heads, units, in_lane, lane_shift, step, limit, near, cells, own_cells, n,
                scale, D_V, CELLS, OWN, LATER,
            )),
            (copy_tiles, (
                q_view, k_view, v_view, k_cells, v_cells, queries, keys, values, first_cell, items, all_heads, heads, units,
                in_lane, row_shift, inner_shift, near, cells, CELLS,
            )),
        ],
        [4, 4, 1],  # warps of the other groups and of the producer
        [160, 160, 24],  # and their registers
    )  # fmt: skip
