"""What all kernels share: where a tile lies, which pairs count, and rows of a matrix as tiles.

A position in the sequence is 32 bits; an address is 64. Rows that may overrun are masked, and so is the part of a row
between the head's dimension and the power of two above it.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

JOB_FIELDS = tl.constexpr(11)
EXCLUSION_FIELDS = tl.constexpr(6)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every finite score: where a running maximum begins, so that it is finite, and a score of -inf has weight 0."""


@triton.jit
def read_job(jobs, index):
    """The fields of a job, in the order of `Job`. The head is 64 bits, since a stride times it may be."""
    row = jobs + index * JOB_FIELDS
    head = tl.load(row).to(tl.int64)
    lanes = tl.load(row + 1)
    lane_shift = tl.load(row + 2)
    step = tl.load(row + 3)
    limit = tl.load(row + 4)
    near = tl.load(row + 5)
    far = tl.load(row + 6)
    own = tl.load(row + 7)
    block = tl.load(row + 8)
    cells = tl.load(row + 9)
    first_cell = tl.load(row + 10)
    return head, lanes, lane_shift, step, limit, near, far, own, block, cells, first_cell


@triton.jit
def locate(tile, lanes, limit, SIZE: tl.constexpr):
    """The lane of a tile and its first index there; past the end of the lane if there is no such tile.

    Neighbouring programs have neighbouring lanes, which lie side by side in memory, and the tiles with most work come first.
    """
    along = (limit + SIZE - 1) // SIZE - 1 - tile // lanes
    return lanes - 1 - tile % lanes, tl.where(along < 0, limit, along * SIZE)


@triton.jit
def lane_length(lane, lane_shift, step, limit, n):
    return tl.minimum(limit, (n - 1 - lane * lane_shift) // step + 1)


@triton.jit
def cell_position(index, cells, block, first_cell):
    """The position of a summary cell; cells are counted from the start of the sequence."""
    return index // cells * block + first_cell + index % cells


@triton.jit
def cell_index(position, cells, block, first_cell):
    """The inverse of `cell_position`, and whether there is a cell at that position."""
    cell = position % block - first_cell
    return position // block * cells + cell, (cell >= 0) & (cell < cells)


@triton.jit
def cell_tile(start, offset, cells, block, first_cell, EVEN: tl.constexpr):
    """The positions of the summary cells start + offset: one number for the whole tile, and what each cell adds to it.

    EVEN: `cells` divides every start. What each cell adds is then the same for all tiles, and computed once.
    """
    base = start * 0
    if EVEN:
        base = start // cells * block
    else:
        offset = start + offset
    return base, cell_position(offset, cells, block, first_cell)


@triton.jit
def window_sees(row, key, near, far, own, block, cells, first_cell, GROUPED: tl.constexpr):
    """Which pairs of a lane count; row and key are indices in the lane that broadcast."""
    distance = row - key
    seen = (distance >= near) & (distance <= far)
    if GROUPED:
        inside = key % block
        in_own_block = (row // block == key // block) & (own != 0)
        is_cell = (inside >= first_cell) & (inside < first_cell + cells)
        seen = seen & (in_own_block | is_cell)
    return seen


@triton.jit
def unmasked_keys(
    first, first_row, near, far, own, block, limit, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """[inner, outer): all rows of a tile of queries see all of a tile of keys that starts there, from key `first` on."""
    inner = first + tl.cdiv(tl.maximum(0, first_row + ROWS - 1 - far - first), COLUMNS) * COLUMNS
    outer = inner + tl.maximum(0, first_row - near + 1 - inner) // COLUMNS * COLUMNS
    if (own == 0) | (block < limit):
        outer = inner
    return inner, outer


@triton.jit
def without_keys(log_sum_exp):
    """Log-sum-exps for backward: inf instead of -inf, so that a row without keys, or with scores of -inf alone, weighs 0."""
    return tl.where(log_sum_exp == float("-inf"), float("inf"), log_sum_exp)


@triton.jit
def excluded(query, key, exclusions, index, COUNT: tl.constexpr):
    """Which pairs belong to an earlier leaf of the union; query and key are positions in the sequence that broadcast."""
    distance = query - key
    found = distance != distance  # none yet, in the shape of the pairs
    for number in tl.static_range(COUNT):
        row = exclusions + (index * COUNT + number) * EXCLUSION_FIELDS
        step, reach, block = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        period, first_cell, end_cell = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        seen = (distance % step == 0) & (distance <= reach) & (query // block == key // block)
        found = found | (seen & (key % period >= first_cell) & (key % period < end_cell))
    return found


@triton.jit
def load_rows(
    matrix, base, offset, stride, valid, DIM: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """[rows, WIDTH] of a matrix with DIM columns, at positions base + offset, and 0 where there is nothing.

    The base is one number, so that in a loop where only it moves the addresses cost one addition each. WIDE: the offsets
    inside a head do not fit into 32 bits; addresses are 64 bits in any case.
    """
    column = tl.arange(0, WIDTH)
    if WIDE:
        offset = offset.to(tl.int64)
    address = (matrix + base.to(tl.int64) * stride) + (offset[:, None] * stride + column[None, :])
    if MASKED:
        if DIM < WIDTH:
            return tl.load(address, mask=valid[:, None] & (column < DIM)[None, :], other=0.0)
        else:
            return tl.load(address, mask=valid[:, None], other=0.0)
    else:
        if DIM < WIDTH:
            return tl.load(address, mask=(column < DIM)[None, :], other=0.0)
        else:
            return tl.load(address)


@triton.jit
def store_rows(values, matrix, base, offset, stride, valid, DIM: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    column = tl.arange(0, WIDTH)
    if WIDE:
        offset = offset.to(tl.int64)
    address = (matrix + base.to(tl.int64) * stride) + (offset[:, None] * stride + column[None, :])
    mask = valid[:, None]
    if DIM < WIDTH:
        mask = mask & (column < DIM)[None, :]
    tl.store(address, values.to(matrix.dtype.element_ty), mask=mask)
