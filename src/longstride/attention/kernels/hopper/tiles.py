"""What kernels that go tile by tile share: where tiles lie, which of their pairs count, and the softmax of one."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(128)
ROWS = gl.constexpr(64)
"""Keys and queries of a tile, and queries of a group of warps."""


@gluon.jit
def locate(item, all_heads, heads, lanes, along):
    """batch, head, lane and first row of an item. Those with most work come first; neighbours are heads at one place."""
    head = item % all_heads
    tile = item // all_heads
    return head // heads, head % heads, lanes - 1 - tile % lanes, (along - 1 - tile // lanes) * TILE


@gluon.jit
def key_tiles(lane, first_row, in_lane, near, far, limit, WINDOW: gl.constexpr):
    """How many tiles of cells the lane's queries see, the first tile of their window, and how many that has, at least one.

    Without a WINDOW there is at least one tile of cells; what is there of it is hidden, as in the first lane.
    """
    cells = (lane * in_lane + TILE - 1) // TILE
    if WINDOW:
        first = gl.maximum(0, first_row - far) // TILE
        last = (gl.minimum(first_row + TILE, limit) - 1 - near) // TILE
        return cells, first, gl.maximum(1, last - first + 1)
    else:
        return gl.maximum(1, cells), 0, 0


@gluon.jit
def first_key(tile, cell_tiles, first_tile):
    """The number of a tile's first cell, or where in the lane its first key is."""
    return gl.where(tile < cell_tiles, tile, first_tile + tile - cell_tiles) * TILE


@gluon.jit
def hide(
    scores, start, is_cell, before, first_row, near, far, inside, own_cells, OWN: gl.constexpr, CELLS: gl.constexpr,
    ALWAYS: gl.constexpr,
):  # fmt: skip
    """-inf for pairs that do not count: cells that are not there, and what lies outside of the window.

    The keys begin with number `start`. Without CELLS all tiles are of the window. ALWAYS: without a look at whether there
    are such pairs.
    """
    layout: gl.constexpr = scores.type.layout
    COLUMNS: gl.constexpr = scores.shape[1]
    outside = (start + COLUMNS - 1 > first_row - near) | (start < first_row + ROWS - 1 - far)
    if not OWN:
        outside = outside | (start == start)
    hidden = outside
    if CELLS > 0:
        hidden = gl.where(is_cell, start + COLUMNS > before, outside)
    if ALWAYS:
        hidden = start == start
    if hidden:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        last = row - near - start
        least = row - far - start
        if CELLS > 0:
            last = gl.where(is_cell, before - 1 - start, last)
            least = gl.where(is_cell, 0, least)
        seen = (column[None, :] <= last[:, None]) & (column[None, :] >= least[:, None])
        if not OWN:
            in_cells = (start + column >= inside) & (start + column < inside + own_cells)
            if CELLS > 0:
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
