"""walk_forward: attention inside a window of up to 128 positions back, for Local, as fast as memory gives the tiles.

A program walks along the sequence in tiles of 64 positions and keeps the keys and values of the last ones in shared memory.
Each is read once, and again only where a program starts. Programs have equal parts of all heads' positions, so a part may
run on from one head into the next. Before a head's first tile there are `back` tiles, which TMA fills with zeros. With
documents (walk_documents.py), one follows the other.
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

from longstride.attention.kernels.arguments import matrix
from longstride.attention.kernels.call import Forward
from longstride.attention.kernels.hopper import lane_tiles, walk_documents
from longstride.attention.kernels.hopper.lane_descriptors import walk_launch
from longstride.attention.kernels.hopper.lane_settings import walk_forward_settings
from longstride.attention.kernels.hopper.ring import make_barriers, make_panels
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.primitives import LOWEST


@gluon.jit
def place(position, work, WALK: gl.constexpr):
    """Batch, head and tile there, with documents also its first row and how many rows it has. A tile below 0 is one of those
    before the sequence."""
    if WALK.documents:
        return walk_documents.locate(position, work)
    else:
        batch, head, tile = lane_tiles.walk_place(position, work, WALK.back)
        return batch, head, tile - WALK.back, 0, ROWS


@gluon.jit
def following_place(batch, head, tile, work, BACK: gl.constexpr):
    """The place after this one."""
    tile += 1
    head += (tile == work.tiles).to(gl.int32)
    tile = gl.where(tile == work.tiles, -BACK, tile)
    batch += (head == work.heads).to(gl.int32)
    head = gl.where(head == work.heads, 0, head)
    return batch, head, tile


@gluon.jit
def fetch_tile(descriptors, batch, head, tile, tile_row, present, full, tiles, WALK: gl.constexpr):
    """Starts to copy the tile at a place in, if it is present."""
    lane_tiles.expect_tiles(full, tiles, present)
    first = tile_row if WALK.documents else tile * ROWS
    lane_tiles.copy_all(descriptors, (batch, head, 0, first), full, tiles, present)


@gluon.jit
def score(query, key, zeros):
    """Starts the product of queries and keys."""
    return warpgroup_mma(query[0], key[0].permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def weigh(scores, largest, tile, scale, DISTANCE: gl.constexpr):
    """The weights; 0 where the tile would be before the sequence."""
    if DISTANCE > 0:
        largest = gl.where(tile >= DISTANCE, largest, float("inf"))
    return gl.exp2(scores * scale - largest[:, None])


@gluon.jit
def write_tile(sums, inverse, output, batch, head, tile, tile_row, staged, WALK: gl.constexpr):
    """Starts to write the output's tile at a place."""
    for panel in gl.static_range(len(sums)):
        staged[panel].store((sums[panel] * inverse[:, None]).to(output.dtype))
    fence_async_shared()
    first = tile_row if WALK.documents else tile * ROWS
    lane_tiles.copy_out(output, (batch, head, 0, first), staged)


@gluon.jit
def walk_forward(q, k, v, output, output_rows, lse, work, scale, WALK: gl.constexpr):
    """q, k, v, output: tensor descriptors. output_rows: the output as a Matrix, with documents."""
    dtype: gl.constexpr = q.dtype
    D: gl.constexpr = q.block_type.shape[4]
    FAR: gl.constexpr = WALK.far
    BACK: gl.constexpr = WALK.back
    AHEAD: gl.constexpr = WALK.ahead
    DOCUMENTS: gl.constexpr = WALK.documents
    RING: gl.constexpr = AHEAD + BACK
    layout: gl.constexpr = mma_layout(ROWS)
    sum_layout: gl.constexpr = mma_layout(D)
    q_tiles = make_panels(dtype, AHEAD, ROWS, D, 1)
    k_tiles = make_panels(dtype, RING, ROWS, D, 1)
    v_tiles = make_panels(dtype, RING, ROWS, D, WALK.panels)
    staged = lane_tiles.panels_at(make_panels(dtype, 1, ROWS, D, WALK.panels), 0)
    full = make_barriers(RING)
    fence_async_shared()
    start, end = lane_tiles.walk_range(work.positions)
    for slot in gl.static_range(RING):
        # The tiles before the program's own have keys and values for it, but no queries.
        batch, head, tile, tile_row, rows = place(start - BACK + slot, work, WALK)
        if slot < BACK:
            tiles = lane_tiles.tiles_at((k_tiles, v_tiles), slot)
            fetch_tile((k, v), batch, head, tile, tile_row, True, full.index(slot), tiles, WALK)
        else:
            tiles = (lane_tiles.panels_at(q_tiles, slot - BACK),) + lane_tiles.tiles_at((k_tiles, v_tiles), slot)
            present = start - BACK + slot < end
            fetch_tile((q, k, v), batch, head, tile, tile_row, present, full.index(slot), tiles, WALK)
    for slot in gl.static_range(BACK):
        mbarrier.wait(full.index(slot), 0)

    batch, head, tile, tile_row, rows = place(start, work, WALK)
    ahead_batch, ahead_head, ahead_tile, ahead_row, _ = place(start + AHEAD, work, WALK)
    for position in range(start, end):
        count = position - start
        # Not known to be 0 before the loop: masks that the compiler makes there would fill the registers.
        zero = count >> 30
        now = (count + BACK) % RING
        q_tile = lane_tiles.panels_at(q_tiles, count % AHEAD)
        mbarrier.wait(full.index(now), ((count + BACK) // RING) & 1)
        if DOCUMENTS:
            if walk_documents.is_ragged(rows):
                walk_documents.clear_rows(lane_tiles.panels_at(v_tiles, now), rows)
            for distance in gl.static_range(1, BACK + 1):
                if tile < distance:  # Those are of the document before.
                    others_place = (count + BACK - distance) % RING
                    others_tiles = lane_tiles.panels_at(v_tiles, others_place) + lane_tiles.panels_at(k_tiles, others_place)
                    walk_documents.clear_tiles(others_tiles)
        if tile >= 0:
            zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
            scores = ()
            for distance in gl.static_range(BACK + 1):
                scores = scores + (score(q_tile, lane_tiles.panels_at(k_tiles, (count + BACK - distance) % RING), zeros),)
            first = lane_tiles.mask_distances(warpgroup_mma_wait(BACK, deps=(scores[0],)), zero, 0, 0, FAR)
            largest = gl.max(first, 1)
            others = lane_tiles.wait_for(scores[1:])
            earlier = ()
            for distance in gl.static_range(BACK, 0, -1):
                masked = lane_tiles.mask_distances(others[distance - 1], zero, distance * ROWS, 0, FAR)
                largest_there = gl.max(masked, 1)
                largest = gl.maximum(largest, gl.where(tile >= distance, largest_there, float("-inf")))
                earlier = (masked,) + earlier
            largest = gl.maximum(largest * scale, LOWEST)  # A score of -inf weighs 0.
            all_weights = weigh(first, largest, tile, scale, 0)
            sums = lane_tiles.empty_sums(WALK.panels, D, sum_layout)
            sums = lane_tiles.add_products(all_weights, lane_tiles.panels_at(v_tiles, now), sums, False)
            for distance in gl.static_range(1, BACK + 1):
                weights = weigh(earlier[distance - 1], largest, tile, scale, distance)
                all_weights += weights
                values = lane_tiles.panels_at(v_tiles, (count + BACK - distance) % RING)
                sums = lane_tiles.add_products(weights, values, sums, True)
            weight = gl.sum(all_weights, 1)
            if DOCUMENTS:
                row = tile_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                end_row = tile_row + rows
            else:
                row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                end_row = work.n
            lse_rows = lse + (batch * work.heads + head).to(gl.int64) * work.n + row
            gl.store(lse_rows, largest + gl.log2(weight), mask=row < end_row)
            inverse = gl.convert_layout(1.0 / gl.where(weight == 0, 1.0, weight), gl.SliceLayout(1, sum_layout))
            tma.store_wait(0)
            sums = lane_tiles.wait_for(sums)
            if DOCUMENTS:
                if rows < ROWS:
                    for panel in gl.static_range(WALK.panels):
                        result = sums[panel] * inverse[:, None]
                        walk_documents.store_rows(result, output_rows, batch, head, tile_row, rows, panel)
                else:
                    write_tile(sums, inverse, output, batch, head, tile, tile_row, staged, WALK)
            else:
                write_tile(sums, inverse, output, batch, head, tile, tile_row, staged, WALK)
        free = (count + BACK + AHEAD) % RING
        tiles = q_tile, lane_tiles.panels_at(k_tiles, free), lane_tiles.panels_at(v_tiles, free)
        present = position + AHEAD < end
        fetch_tile((q, k, v), ahead_batch, ahead_head, ahead_tile, ahead_row, present, full.index(free), tiles, WALK)
        if DOCUMENTS:
            batch, head, tile, tile_row, rows = place(position + 1, work, WALK)
            ahead_batch, ahead_head, ahead_tile, ahead_row, _ = place(position + 1 + AHEAD, work, WALK)
        else:
            batch, head, tile = following_place(batch, head, tile, work, BACK)
            ahead_batch, ahead_head, ahead_tile = following_place(ahead_batch, ahead_head, ahead_tile, work, BACK)
    tma.store_wait(0)


def launch_walk_forward(call: Forward, reach: int) -> Launch:
    """For Local(reach), reach <= 128."""
    *matrices, lse = call.tensors
    documents = call.layout.documents if call.layout else None
    return walk_launch(
        walk_forward, matrices, matrix(call.output), lse, reach, walk_forward_settings, documents, False, call.scale
    )  # fmt: skip
