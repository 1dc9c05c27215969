"""Where the tiles of a walk lie; and documents of any lengths in one, with tiles that have rows of the next document, too.

Tiles count from a document's start, whatever row that is, so only a document's last tile can have rows of the next. These
are set to 0 before a product takes them, since a weight of 0 times NaN is NaN. Results of such a tile are stored row by row,
those of others by TMA. Backward there are tiles of zeros between two documents, as between heads. Forward a document's first
tiles replace those before them by zeros.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from longstride.attention.kernels.hopper.tiles import ROWS, head_pointer, row_layout, row_pointers
from longstride.attention.kernels.work import WalkTile

FIELDS = gl.constexpr(len(WalkTile._fields))


@gluon.jit
def place(position, work, WALK: gl.constexpr, FIRST: gl.constexpr):
    """Batch, head and tile at a position, with documents also its first row and how many rows it has.

    FIRST: of a head's tiles. Those that are not 0 to work.tiles - 1 lie between two heads. Between documents, and outside of
    their walk, the tile is below 0 and has no rows, and TMA reads zeros there.
    """
    if WALK.documents:
        sequence = position // work.tiles
        entry = work.table + position % work.tiles * FIELDS
        inside = (position >= 0) & (position < work.positions)
        batch = gl.load(entry, mask=inside, other=0) + sequence // work.heads
        tile = gl.load(entry + 1, mask=inside, other=-1)
        first = gl.load(entry + 2, mask=inside, other=-ROWS)
        rows = gl.load(entry + 3, mask=inside, other=0)
        return batch, sequence % work.heads, tile, first, rows
    else:
        tiles = work.tiles + WALK.back
        head = position // tiles
        return head // work.heads, head % work.heads, position % tiles + FIRST, 0, ROWS


@gluon.jit
def is_ragged(rows):
    """Whether a tile has rows, and others that are not the document's."""
    return (rows > 0) & (rows < ROWS)


@gluon.jit
def clear_rows(panels, rows):
    """Sets the rows after the first ones to 0, in shared memory, before products read them."""
    layout: gl.constexpr = row_layout(panels[0].shape[1])
    own = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < rows
    for panel in gl.static_range(len(panels)):
        loaded = panels[panel].load(layout)
        panels[panel].store(gl.where(own[:, None], loaded, 0.0).to(loaded.dtype))
    fence_async_shared()


@gluon.jit
def clear_tiles(panels):
    """Sets all rows to 0."""
    D: gl.constexpr = panels[0].shape[1]
    dtype: gl.constexpr = panels[0].dtype
    zeros = gl.zeros([ROWS, D], dtype, row_layout(D))
    for panel in gl.static_range(len(panels)):
        panels[panel].store(zeros)
    fence_async_shared()


@gluon.jit
def store_rows(value, matrix, batch, head, first, rows, PANEL: gl.constexpr):
    """Writes the first rows of a panel."""
    layout: gl.constexpr = value.type.layout
    D: gl.constexpr = value.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    panel = head_pointer(matrix, batch, head) + PANEL * D
    pointers, mask = row_pointers(panel, first + row, row < rows, matrix.row, D, D, layout)
    gl.store(pointers, value.to(matrix.data.dtype.element_ty), mask=mask)
