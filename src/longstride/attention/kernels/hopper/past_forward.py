"""past_forward: all of the own lane so far, and summary cells of the lanes before it, one pattern in all heads.

Each of three warpgroups has 64 queries of the same lane or of the next one: they see nearly the same keys, which one warp
copies into shared memory for all of them. If values have two panels there are two warpgroups, each with more registers. One
TMA copy takes the cells of several lanes. A tile of 128 keys is computed as two halves: the product of one half runs while
the softmax of the other is taken. Tiles that are seen whole have a loop of their own, without masks. Programs are
persistent: the next queries and keys are copied while results are written.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper import lane_tiles, tiles
from longstride.attention.kernels.hopper.ring import beside, fill_both, item_of_round, make_ring, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, TILE
from longstride.attention.kernels.primitives import is_summary_cell

GROUPS_OF = {1: 3, 2: 2}
"""Warpgroups that compute, by the panels of a value."""


@gluon.jit
def locate_unit(item, work, GROUPS: gl.constexpr):
    """batch, head and the first of the item's units. Items with most work come first."""
    head = item % work.all_heads
    place = (work.all_tiles + GROUPS - 1) // GROUPS - 1 - item // work.all_heads
    return head // work.heads, head % work.heads, place * GROUPS


@gluon.jit
def last_lane(unit, work, GROUPS: gl.constexpr):
    """The lane of an item's last unit; the last item may have fewer units than others."""
    return gl.minimum(unit + GROUPS - 1, work.all_tiles - 1) // work.tiles


@gluon.jit
def own_tiles(lane, unit, job, work, GROUPS: gl.constexpr):
    """How many tiles of a lane's own keys the item's queries see, at least one."""
    end = gl.minimum(gl.minimum(unit + GROUPS, work.all_tiles) - lane * work.tiles, work.tiles)
    return (end * ROWS - 1 - job.near) // TILE + 1


@gluon.jit
def copy_past(sources, rings, job, work, KEYS: gl.constexpr, GROUPS: gl.constexpr):
    """The producer warp."""
    q, k, v, k_cells, v_cells = sources
    queries, keys, values = rings
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, unit = locate_unit(item_of_round(turn), work, GROUPS)
        for group in gl.static_range(GROUPS):
            mine = gl.minimum(unit + group, work.all_tiles - 1)
            place = tiles.lane_coordinates(batch, head, mine // work.tiles, mine % work.tiles * ROWS, work)
            queries.fill(GROUPS * turn + group, q, place)
        last = last_lane(unit, work, GROUPS)
        if KEYS.cells > 0:
            first_cell = gl.load(work.first_cells + head)
            for tile in range(tiles.cell_tiles(last, job)):
                place = tiles.cell_coordinates(batch, head, tile * TILE, first_cell, KEYS)
                fill_both(keys, values, count, k_cells, v_cells, place)
                count += 1
        for lane in range(unit // work.tiles, last + 1):
            for tile in range(own_tiles(lane, unit, job, work, GROUPS)):
                fill_both(keys, values, count, k, v, tiles.lane_coordinates(batch, head, lane, tile * TILE, work))
                count += 1


@gluon.jit
def skip(keys, begin, end):
    """Releases tiles that only other warpgroups need."""
    for turn in range(begin, end):
        keys.wait_full(turn)
        keys.release(turn)


@gluon.jit
def half_tile(ring, turn, half):
    """Half of a tile, in panels."""
    WIDTH: gl.constexpr = ring.tiles.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], ring.tiles.dtype)
    halves = ring.tiles._reinterpret(ring.tiles.dtype, [2 * ring.tiles.shape[0], ROWS, WIDTH], layout)
    result = ()
    for panel in gl.static_range(ring.panels):
        result = result + (halves.index((turn % ring.stages * ring.panels + panel) * 2 + half),)
    return result


@gluon.jit
def score_half(query, keys, turn, half):
    layout: gl.constexpr = tiles.mma_layout(ROWS)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
    return warpgroup_mma(query, half_tile(keys, turn, half)[0].permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_half_values(weights, shrink, sums, values, turn, half):
    return lane_tiles.add_products(weights, half_tile(values, turn, half), lane_tiles.scale_rows(sums, shrink), True)


@gluon.jit
def take_tile(state, query, keys, values, turn, scale):
    """A tile that is seen whole."""
    running_max, weight, sums = state
    keys.wait_full(turn)
    left = score_half(query, keys, turn, 0)
    right = score_half(query, keys, turn, 1)
    scores = warpgroup_mma_wait(1, deps=(left,))
    weights, shrink, running_max, weight = tiles.take_softmax(scores, running_max, weight, scale)
    adding = add_half_values(weights, shrink, sums, values, turn, 0)
    scores = warpgroup_mma_wait(values.panels, deps=(right,))
    weights, shrink, running_max, weight = tiles.take_softmax(scores, running_max, weight, scale)
    sums = lane_tiles.wait_for(adding)
    adding = add_half_values(weights, shrink, sums, values, turn, 1)
    sums = lane_tiles.wait_for(adding)
    keys.release(turn)
    return running_max, weight, sums


@gluon.jit
def mask_half(scores, start, is_cell, sight, job, KEYS: gl.constexpr):
    """-inf for cells that are not before the lane, and for keys of it that are not `near` positions back."""
    layout: gl.constexpr = scores.type.layout
    column = start + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    row = sight.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    last = gl.where(is_cell, sight.before - 1, row - job.near)
    seen = column[None, :] <= last[:, None]
    if not KEYS.own:
        seen = seen & (is_cell | is_summary_cell(column, job.cells, sight.first_cell))[None, :]
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def take_half(state, query, keys, values, turn, half, is_last, is_cell, sight, job, scale, KEYS: gl.constexpr):
    """One half of a tile, with masks; `half` counts from the first tile of the lane or cells. is_last: of the tile."""
    running_max, weight, sums = state
    turn += half // 2
    keys.wait_full(turn)
    scores = warpgroup_mma_wait(0, deps=(score_half(query, keys, turn, half % 2),))
    scores = mask_half(scores, half * ROWS, is_cell, sight, job, KEYS)
    weights, shrink, running_max, weight = tiles.take_softmax(scores, running_max, weight, scale)
    sums = lane_tiles.wait_for(add_half_values(weights, shrink, sums, values, turn, half % 2))
    mbarrier.arrive(keys.empty.index(turn % keys.stages), count=1, pred=is_last)
    return running_max, weight, sums


@gluon.jit
def compute_past(
    group: gl.constexpr, rings, output, lse, job, work, scale,
    D_V: gl.constexpr, KEYS: gl.constexpr, GROUPS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup, for its unit of an item."""
    queries, keys, values = rings
    WIDTH_V: gl.constexpr = values.tiles.shape[2]
    layout: gl.constexpr = tiles.mma_layout(ROWS)
    count = 0
    for turn in range(rounds(work.items)):
        batch, head, unit = locate_unit(item_of_round(turn), work, GROUPS)
        mine = gl.minimum(unit + group, work.all_tiles - 1)
        lane = mine // work.tiles
        first_row = mine % work.tiles * ROWS
        last = last_lane(unit, work, GROUPS)
        total = tiles.cell_tiles(last, job)
        own_turn = total
        for other in range(unit // work.tiles, last + 1):
            own_turn = gl.where(other == lane, total, own_turn)
            total += own_tiles(other, unit, job, work, GROUPS)
        before = lane * job.cells
        first_cell = 0
        if not KEYS.own:
            first_cell = gl.load(work.first_cells + head)
        sight = tiles.Sight(first_row, before, first_cell)
        # A warpgroup past the last unit computes the last one once more, and writes nothing.
        length = gl.where(unit + group < work.all_tiles, tiles.lane_length(lane, job, work.n), 0)
        rows = tiles.place_rows(output, lse, batch, head, lane, first_row, length, job, work, layout)
        state = tiles.begin_softmax(rows, layout, D_V, WIDTH_V, KEYS.panels, ACCUMULATE)

        query = queries.wait_full(GROUPS * turn + group).load(tiles.operand_layout(layout))
        queries.release(GROUPS * turn + group)
        done = 0
        for part in range(0 if KEYS.cells > 0 else 1, 2):  # the cells, and the own lane
            is_cell = part == 0
            begin = gl.where(is_cell, 0, own_turn)
            # Keys that all of these queries see, and those that any of them sees.
            all_see = gl.where(is_cell, before, gl.maximum(0, first_row - job.near + 1))
            any_sees = gl.where(is_cell, before, first_row + ROWS - job.near)
            if not KEYS.own:
                all_see = gl.where(is_cell, before, 0)
            whole = all_see // TILE
            skip(keys, count + done, count + begin)
            for tile in range(whole):
                state = take_tile(state, query, keys, values, count + begin + tile, scale)
            done = begin + whole
            halves = (any_sees + ROWS - 1) // ROWS
            for half in range(2 * whole, halves):
                is_last = (half % 2 == 1) | (half == halves - 1)
                state = take_half(state, query, keys, values, count + begin, half, is_last, is_cell, sight, job, scale, KEYS)
                done += is_last.to(gl.int32)
        skip(keys, count + done, count + total)
        count += total

        running_max, weight, sums = state
        nothing = weight == 0
        weight = gl.where(nothing, 1.0, weight)
        tiles.store_rows(lane_tiles.scale_rows(sums, 1.0 / weight), running_max, weight, nothing, rows, D_V)


@gluon.jit
def past_forward(
    q, k, v, k_cells, v_cells, output, lse, job, work, scale,
    D_V: gl.constexpr, KEYS: gl.constexpr, GROUPS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """q to v_cells: tensor descriptors. The tiles in `work` are units, of which GROUPS are an item.

    ACCUMULATE: as in window_forward.
    """
    dtype: gl.constexpr = q.dtype
    queries = make_ring(dtype, 2 * GROUPS, ROWS, q.block_type.shape[4], 1)
    keys = make_ring(dtype, 4 if KEYS.panels == 1 else 3, TILE, k.block_type.shape[4], GROUPS)
    values = beside(keys, dtype, TILE, v.block_type.shape[4], KEYS.panels)
    rings = queries, keys, values
    fence_async_shared()
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (compute_past, (gl.constexpr(0), rings, output, lse, job, work, scale, D_V, KEYS, GROUPS, ACCUMULATE)),
                (compute_past, (gl.constexpr(1), rings, output, lse, job, work, scale, D_V, KEYS, GROUPS, ACCUMULATE)),
                (compute_past, (gl.constexpr(2), rings, output, lse, job, work, scale, D_V, KEYS, GROUPS, ACCUMULATE)),
                (copy_past, ((q, k, v, k_cells, v_cells), rings, job, work, KEYS, GROUPS)),
            ],
            [4, 4, 1],  # warps of the other warpgroups and of the producer
            [160, 160, 24],  # and their registers
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_past, (gl.constexpr(0), rings, output, lse, job, work, scale, D_V, KEYS, GROUPS, ACCUMULATE)),
                (compute_past, (gl.constexpr(1), rings, output, lse, job, work, scale, D_V, KEYS, GROUPS, ACCUMULATE)),
                (copy_past, ((q, k, v, k_cells, v_cells), rings, job, work, KEYS, GROUPS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
