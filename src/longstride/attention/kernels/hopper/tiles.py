"""What the Hopper kernels share: layouts, their arguments, where a tile lies, which of its pairs count, and its softmax."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longstride.attention.kernels.hopper import choice
from longstride.attention.kernels.primitives import LOWEST, is_summary_cell

TILE = gl.constexpr(choice.TILE)
ROWS = gl.constexpr(choice.ROWS)
"""Rows of a warpgroup: queries, or keys where pairs lie keys down. Half a tile."""


class Work(NamedTuple):
    """What a launch computes, in items: one tile of queries or keys of one head each. The rest is the `Job` of the heads."""

    items: Any
    heads: Any
    all_heads: Any  # batch * heads
    n: Any
    tiles: Any  # of a lane
    all_tiles: Any  # of all lanes of a head
    row_shift: Any  # What the index of a lane adds to the coordinates of a tensor descriptor, [batch, head, row, inner, 0],
    inner_shift: Any
    stats_shift: Any  # and to the place of a query's row stats.
    first_cells: Any  # the first summary cell of a block, int32 [heads]
    splits: Any  # hopper_dkv: items that share the queries of a tile of cells


class RowStats(NamedTuple):
    """lse and delta of the queries, float32 [batch * heads, 2, row]."""

    data: Any
    row: Any


class KeyKinds(NamedTuple):
    """Which keys a launch has. Compiled in, as one constexpr."""

    cells: Any  # summary cells of a block that later lanes see; 0: none
    own: Any  # whether a query sees its own block, and not only its cells
    window: Any  # whether keys of the own lane count, and not only cells of earlier ones
    panels: Any  # of a value, each as wide as a query; then d_v is a multiple of d_qk


class WarpgroupRows(NamedTuple):
    """The queries of a warpgroup: ROWS rows of a lane, from `first` on. Rows from `length` on are not there."""

    output: Any  # pointer to the head's first row
    stride: Any  # of the output
    lse: Any  # pointer to the lane's first row
    start: Any  # position of the lane's first row
    step: Any  # from one row's position to the next
    first: Any
    index: Any  # all rows, as scores lie; made before the loop over keys, which costs fewer spills than after it
    length: Any


class Sight(NamedTuple):
    """What says which keys the queries of a warpgroup see, with the `Job`."""

    first_row: Any
    before: Any  # summary cells before the lane
    first_cell: Any  # of a block


@gluon.constexpr_function
def mma_layout(columns):
    """The layout of an accumulator with so many columns, in a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(accumulator):
    """The layout of a product's left operand in registers."""
    return gl.DotOperandLayout(0, accumulator, 2)


@gluon.constexpr_function
def row_layout(width):
    """A layout for loads and stores of whole rows, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def locate_tile(item, job, work, KEYS: gl.constexpr):
    """batch, head, lane and first row of an item; neighbours are heads at one place.

    Those with most work come first: with cells the last lanes, else the last rows of each lane, one lane after the other.
    """
    head = item % work.all_heads
    tile = item // work.all_heads
    if KEYS.cells > 0:
        lane, tile = job.lanes - 1 - tile % job.lanes, tile // job.lanes
    else:
        lane, tile = tile // work.tiles, tile % work.tiles
    return head // work.heads, head % work.heads, lane, (work.tiles - 1 - tile) * TILE


@gluon.jit
def lane_length(lane, job, n):
    """The last lanes may be shorter than `limit`."""
    return gl.minimum(job.limit, (n - 1 - lane * job.lane_stride) // job.index_stride + 1)


@gluon.jit
def lane_coordinates(batch, head, lane, row, work):
    """The coordinates of a lane's row in a tensor descriptor."""
    return batch, head, lane * work.row_shift + row, lane * work.inner_shift, 0


@gluon.jit
def cell_coordinates(batch, head, key, first_cell, KEYS: gl.constexpr):
    """The same for summary cells, from number `key` on."""
    return batch, head, key // KEYS.cells, first_cell + key % KEYS.cells, 0


@gluon.jit
def cell_tiles(lane, job):
    """How many tiles of cells there are before a lane."""
    return (lane * job.cells + TILE - 1) // TILE


@gluon.jit
def key_tiles(lane, first_row, job, KEYS: gl.constexpr):
    """How many tiles of cells the lane's queries see, the first tile of their window, and how many that has, at least one.

    Without a window there is at least one tile of cells; in the first lane all of it is masked.
    """
    cells = cell_tiles(lane, job)
    if KEYS.window:
        first = gl.maximum(0, first_row - job.far) // TILE
        last = (first_row + TILE - 1 - job.near) // TILE
        return cells, first, gl.maximum(1, last - first + 1)
    else:
        return gl.maximum(1, cells), 0, 0


@gluon.jit
def first_key(tile, cell_tiles, first_tile):
    """The index of a tile's first key, among the cells or in the lane."""
    return gl.where(tile < cell_tiles, tile, first_tile + tile - cell_tiles) * TILE


@gluon.jit
def mask_scores(scores, start, is_cell, sight, job, KEYS: gl.constexpr, ALWAYS: gl.constexpr):
    """-inf for pairs that do not count: cells that are not among the `before` ones, and keys outside of the window.

    The keys have the indices from `start` on. Without cells all tiles are of the window. ALWAYS: does not look first whether
    there are such pairs.
    """
    layout: gl.constexpr = scores.type.layout
    COLUMNS: gl.constexpr = scores.shape[1]
    first_row, before, first_cell = sight
    outside = (start + COLUMNS - 1 > first_row - job.near) | (start < first_row + ROWS - 1 - job.far)
    if not KEYS.own:
        outside = outside | (start == start)
    masked = outside
    if KEYS.cells > 0:
        masked = gl.where(is_cell, start + COLUMNS > before, outside)
    if ALWAYS or masked:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        last = row - job.near - start
        least = row - job.far - start
        if KEYS.cells > 0:
            last = gl.where(is_cell, before - 1 - start, last)
            least = gl.where(is_cell, 0, least)
        seen = (column[None, :] <= last[:, None]) & (column[None, :] >= least[:, None])
        if not KEYS.own:
            in_cells = is_summary_cell(start + column, job.cells, first_cell)
            if KEYS.cells > 0:
                in_cells = in_cells | is_cell
            seen = seen & in_cells[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def take_softmax(scores, running_max, weight, scale):
    """`running_max` begins at LOWEST and is never -inf, so that a score of -inf weighs 0."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_max[:, None])
    shrink = gl.exp2(running_max - new_max)
    return weights, shrink, new_max, weight * shrink + gl.sum(weights, 1)


@gluon.jit
def head_pointer(matrix, batch, head):
    return matrix.data + batch.to(gl.int64) * matrix.batch + head.to(gl.int64) * matrix.head


@gluon.jit
def row_pointers(head, position, valid, stride, D: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Pointers [rows, WIDTH] to these positions of a head, and the mask for them."""
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    pointers = head + (position.to(gl.int64)[:, None] * stride + column[None, :])
    return pointers, valid[:, None] & (column < D)[None, :]


@gluon.jit
def store_gradient(
    total, matrix, batch, head, position, valid, D: gl.constexpr, ACCUMULATE: gl.constexpr, PANEL: gl.constexpr = 0
):  # fmt: skip
    """Writes the sums of these positions, or a panel of them. ACCUMULATE: adds them to the gradient of an earlier pass."""
    WIDTH: gl.constexpr = total.shape[1]
    layout: gl.constexpr = row_layout(WIDTH)
    head = head_pointer(matrix, batch, head) + PANEL * WIDTH
    pointers, mask = row_pointers(head, position, valid, matrix.row, D - PANEL * WIDTH, WIDTH, layout)
    result = gl.convert_layout(total, layout)
    if ACCUMULATE:
        result += gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    gl.store(pointers, result.to(matrix.data.dtype.element_ty), mask=mask)


@gluon.jit
def place_rows(output, lse, batch, head, lane, first, length, job, work, layout: gl.constexpr):
    start = lane * job.lane_stride
    lse += (batch * work.heads + head).to(gl.int64) * work.n + start
    index = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return WarpgroupRows(head_pointer(output, batch, head), output.row, lse, start, job.index_stride, first, index, length)


@gluon.jit
def output_pointers(rows, PANEL: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    row = rows.first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    head = rows.output + PANEL * WIDTH
    return row_pointers(head, rows.start + row * rows.step, row < rows.length, rows.stride, D - PANEL * WIDTH, WIDTH, layout)


@gluon.jit
def begin_softmax(
    rows, layout: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, ACCUMULATE: gl.constexpr
):  # fmt: skip
    """The state before the first key, or after an earlier pass: running maximum, weight and weighted sums of values, one for
    each panel.
    """
    sum_layout: gl.constexpr = mma_layout(WIDTH)
    running_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, layout))
    weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    if ACCUMULATE:
        earlier = gl.load(rows.lse + rows.index * rows.step, mask=rows.index < rows.length, other=float("-inf"))
        weight = gl.where(earlier == float("-inf"), 0.0, 1.0)
        running_max = gl.where(earlier == float("-inf"), LOWEST, earlier)
    sums = ()
    for panel in gl.static_range(PANELS):
        if ACCUMULATE:
            pointers, mask = output_pointers(rows, panel, D, WIDTH, sum_layout)
            sums = sums + (gl.load(pointers, mask=mask, other=0.0).to(gl.float32),)
        else:
            sums = sums + (gl.zeros([ROWS, WIDTH], gl.float32, sum_layout),)
    return running_max, weight, sums


@gluon.jit
def store_rows(result, running_max, weight, nothing, rows, D: gl.constexpr):
    """Writes output, in panels, and lse. nothing: where a query has no key; its weight is 1 here."""
    WIDTH: gl.constexpr = result[0].shape[1]
    store_layout: gl.constexpr = row_layout(WIDTH)
    for panel in gl.static_range(len(result)):
        pointers, mask = output_pointers(rows, panel, D, WIDTH, store_layout)
        gl.store(pointers, gl.convert_layout(result[panel].to(rows.output.dtype.element_ty), store_layout), mask=mask)
    lse = gl.where(nothing, float("-inf"), running_max + gl.log2(weight))
    gl.store(rows.lse + rows.index * rows.step, lse, mask=rows.index < rows.length)
