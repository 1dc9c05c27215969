"""walk_backward: the gradients inside a window of up to 128 positions back, for Local: dq, dk and dv in one kernel.

A program walks along the sequence as walk_forward does, here from one tile of keys to the next: 64 keys are seen by the
queries of their own tile and of the `back` tiles after it. These stay in shared memory, and their dq in registers, until all
their keys are through. So a part begins `back` tiles early, and writes nothing there. Pairs lie keys down and queries
across, as in lane_backward. After a head's last tile there are `back` tiles of zeros. With documents, each is walked along
as a head is (walk_documents.py).

With values of several panels, shared memory has no room for two programs with tiles of the output and of gradients. Then the
output is loaded into registers, and gradients are written from the tiles of q, k and v that are done with.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from longstride.attention.kernels.hopper import lane_tiles, walk_documents
from longstride.attention.kernels.hopper.pair_gradients import QueryTile, add_pairs
from longstride.attention.kernels.hopper.ring import make_barriers, make_panels, make_tiles
from longstride.attention.kernels.hopper.tiles import ROWS, head_pointer, mma_layout, row_layout, row_pointers
from longstride.attention.kernels.primitives import without_keys


@gluon.jit
def fetch_position(queries, query_tiles, keys, key_tiles, position, end, work, full, WALK: gl.constexpr):
    """Starts to copy in the values and keys of a position, and the last queries that see them.

    Tensors with several panels come first in both: Triton 3.6 takes ((a, b), (c,)) and ((a,), (b, c)) for one type, and
    would compile copy_all only once.
    """
    present = position < end
    lane_tiles.expect_tiles(full, query_tiles + key_tiles, present)
    batch, head, tile, tile_row, _ = walk_documents.place(position + WALK.back, work, WALK, 0)
    first = tile_row if WALK.documents else tile * ROWS
    lane_tiles.copy_all(queries, (batch, head, 0, first), full, query_tiles, present)
    batch, head, tile, tile_row, _ = walk_documents.place(position, work, WALK, 0)
    first = tile_row if WALK.documents else tile * ROWS
    lane_tiles.copy_all(keys, (batch, head, 0, first), full, key_tiles, present)


@gluon.jit
def is_there(row, index, rows, position, work, WALK: gl.constexpr):
    """Whether a row of the tile at a position is there; `index` is its position in the sequence."""
    if WALK.documents:
        return row < rows
    else:
        # The last positions have no newer tile: memory after the last head is not the caller's.
        return (index >= 0) & (index < work.n) & (position < work.positions)


@gluon.jit
def load_rows(matrix, batch, head, first, rows, position, work, D: gl.constexpr, WALK: gl.constexpr):
    """The panels of a tile, in registers; zeros for rows that are not there."""
    layout: gl.constexpr = row_layout(D)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    index = first + row
    valid = is_there(row, index, rows, position, work, WALK)
    head_rows = head_pointer(matrix, batch, head)
    result = ()
    for panel in gl.static_range(WALK.panels):
        pointers, mask = row_pointers(head_rows + panel * D, index, valid, matrix.row, D, D, layout)
        result = result + (gl.load(pointers, mask=mask, other=0.0),)
    return result


@gluon.jit
def store_panel(
    value, descriptor, matrix, batch, head, tile, tile_row, rows, staged, WALK: gl.constexpr, PANEL: gl.constexpr = 0
):  # fmt: skip
    """Writes a panel of a gradient's tile, of which so many rows are the document's."""
    if WALK.documents and rows < ROWS:
        walk_documents.store_rows(value, matrix, batch, head, tile_row, rows, PANEL)
    else:
        tma.store_wait(2)
        staged.store(value.to(descriptor.dtype))
        fence_async_shared()
        first = tile_row if WALK.documents else tile * ROWS
        lane_tiles.copy_out(descriptor, (batch, head, 0, first), (staged,), PANEL)


@gluon.jit
def query_tile(q_tiles, d_output_tiles, lse_rows, delta_rows, place):
    """The queries at a place of the rings."""
    return QueryTile(
        q_tiles[0].index(place), lane_tiles.panels_at(d_output_tiles, place), lse_rows.index(place), delta_rows.index(place)
    )  # fmt: skip


@gluon.jit
def walk_backward(q, k, v, d_output, output, dq, dk, dv, gradient_rows, lse, work, scales, WALK: gl.constexpr):
    """q to dv: tensor descriptors, except `output` where values have several panels, which is a Matrix then. gradient_rows:
    `Gradients`, with documents."""
    dtype: gl.constexpr = q.dtype
    D: gl.constexpr = q.block_type.shape[4]
    FAR: gl.constexpr = WALK.far
    BACK: gl.constexpr = WALK.back
    AHEAD: gl.constexpr = WALK.ahead
    PART: gl.constexpr = WALK.part
    DOCUMENTS: gl.constexpr = WALK.documents
    RING: gl.constexpr = AHEAD + BACK
    sum_layout: gl.constexpr = mma_layout(D)
    load_layout: gl.constexpr = row_layout(D)
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PANELS: gl.constexpr = WALK.panels
    q_tiles = make_panels(dtype, RING, ROWS, D, 1)
    d_output_tiles = make_panels(dtype, RING, ROWS, D, PANELS)
    k_tiles = make_panels(dtype, AHEAD, ROWS, D, 1)
    v_tiles = make_panels(dtype, AHEAD, ROWS, D, PANELS)
    d_scores_tile = make_tiles(dtype, 1, ROWS, ROWS).index(0)
    sources = d_output, q
    if PANELS == 1:
        sources = output, d_output, q
        output_tiles = make_panels(dtype, AHEAD, ROWS, D, 1)
        staging = make_tiles(dtype, 3, ROWS, D)
    lse_rows = gl.allocate_shared_memory(gl.float32, [RING, ROWS], vector_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [RING, ROWS], vector_layout)
    full = make_barriers(AHEAD)
    fence_async_shared()
    start, end = lane_tiles.walk_range(work.positions)
    # What the first BACK tiles of queries are does not matter: no result of theirs is written here.
    first = start - BACK
    for slot in gl.static_range(AHEAD):
        newest = (slot + BACK) % RING
        newest_tiles = lane_tiles.tiles_at((d_output_tiles, q_tiles), newest)
        first_keys = lane_tiles.tiles_at((v_tiles, k_tiles), slot)
        if PANELS == 1:
            newest_tiles = [lane_tiles.panels_at(output_tiles, slot)] + newest_tiles
        fetch_position(sources, newest_tiles, (v, k), first_keys, first + slot, end, work, full.index(slot), WALK)

    row = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    dq_next = gl.zeros([ROWS, D], gl.float32, sum_layout)
    dq_last = gl.zeros([ROWS, D], gl.float32, sum_layout)
    for position in range(first, end):
        count = position - first
        # Not known to be 0 before the loop: masks and addresses that the compiler makes there would fill the registers.
        zero = count >> 30
        batch, head, tile, tile_row, newest_rows = walk_documents.place(position + BACK, work, WALK, 0)
        newest_row = tile_row if DOCUMENTS else tile * ROWS
        index = newest_row + row
        pointers = lse + (batch * work.heads + head).to(gl.int64) * work.n + index
        valid = is_there(row, index, newest_rows, position + BACK, work, WALK)
        newest_lse = without_keys(gl.load(pointers, mask=valid, other=float("inf")))
        if PANELS > 1:
            outputs = load_rows(output, batch, head, newest_row, newest_rows, position + BACK, work, D, WALK)
        batch, head, tile, tile_row, rows = walk_documents.place(position, work, WALK, 0)
        stage = count % AHEAD + zero
        now = count % RING
        after = (count + 1) % RING
        newest = (count + BACK) % RING
        k_tile, v_tile = lane_tiles.tiles_at((k_tiles, v_tiles), stage)
        keys = k_tile[0], v_tile
        mbarrier.wait(full.index(stage), (count // AHEAD) & 1)
        if DOCUMENTS:
            if walk_documents.is_ragged(newest_rows):
                newest_panels = lane_tiles.panels_at(d_output_tiles, newest) + lane_tiles.panels_at(q_tiles, newest)
                walk_documents.clear_rows(newest_panels, newest_rows)
            if walk_documents.is_ragged(rows):
                walk_documents.clear_rows(v_tile + k_tile, rows)
        lse_rows.index(newest).store(newest_lse)
        d_outputs = lane_tiles.load_panels(lane_tiles.panels_at(d_output_tiles, newest), load_layout)
        if PANELS == 1:
            output_tile = lane_tiles.panels_at(output_tiles, stage)
            outputs = lane_tiles.load_panels(output_tile, load_layout)
        delta = lane_tiles.row_products(d_outputs, outputs)
        if DOCUMENTS:  # The output of the next document may be NaN.
            delta = gl.where(gl.arange(0, ROWS, gl.SliceLayout(1, load_layout)) < newest_rows, delta, 0.0)
        delta_rows.index(newest).store(delta)
        if (tile >= 0) & (tile < work.tiles):
            dk_sum = gl.zeros([ROWS, D], gl.float32, sum_layout)
            dv_sum = lane_tiles.empty_sums(PANELS, D, sum_layout)
            queries = query_tile(q_tiles, d_output_tiles, lse_rows, delta_rows, now)
            dq_sum, dk_sum, dv_sum = add_pairs(
                (dq_next, dk_sum, dv_sum), queries, keys, d_scores_tile, scales.scores, zero, 0, 0, FAR, PART, False, True
            )  # fmt: skip
            if position >= start:
                dq_tile = staging.index(0) if PANELS == 1 else q_tiles[0].index(now)
                dq_rows = gradient_rows.dq if DOCUMENTS else None
                store_panel(dq_sum * scales.gradients, dq, dq_rows, batch, head, tile, tile_row, rows, dq_tile, WALK)
            queries = query_tile(q_tiles, d_output_tiles, lse_rows, delta_rows, after)
            dq_next, dk_sum, dv_sum = add_pairs(
                (dq_last, dk_sum, dv_sum), queries, keys, d_scores_tile, scales.scores, zero,
                ROWS, 0, FAR, PART, BACK == 1, False,
            )  # fmt: skip
            if BACK == 2:
                queries = query_tile(q_tiles, d_output_tiles, lse_rows, delta_rows, newest)
                dq_last, dk_sum, dv_sum = add_pairs(
                    (dq_last, dk_sum, dv_sum), queries, keys, d_scores_tile, scales.scores, zero,
                    2 * ROWS, 0, FAR, PART, True, False,
                )  # fmt: skip
            if position >= start:
                dk_tile = staging.index(1) if PANELS == 1 else k_tile[0]
                dk_rows = gradient_rows.dk if DOCUMENTS else None
                dv_rows = gradient_rows.dv if DOCUMENTS else None
                store_panel(dk_sum * scales.gradients, dk, dk_rows, batch, head, tile, tile_row, rows, dk_tile, WALK)
                for panel in gl.static_range(PANELS):
                    dv_tile = staging.index(2) if PANELS == 1 else v_tile[panel]
                    store_panel(dv_sum[panel], dv, dv_rows, batch, head, tile, tile_row, rows, dv_tile, WALK, panel)
        else:
            dq_next = gl.zeros([ROWS, D], gl.float32, sum_layout)
            dq_last = gl.zeros([ROWS, D], gl.float32, sum_layout)
        done_tiles = lane_tiles.tiles_at((d_output_tiles, q_tiles), now)
        if PANELS == 1:
            done_tiles = [output_tile] + done_tiles
        else:
            tma.store_wait(0)  # The next tiles are copied to where gradients are written from.
        fetch_position(
            sources, done_tiles, (v, k), [v_tile, k_tile], position + AHEAD, end, work, full.index(stage), WALK
        )  # fmt: skip
    tma.store_wait(0)
