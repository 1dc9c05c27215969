"""walk_forward: attention inside a window of up to 128 positions back, for Local, as fast as memory gives the tiles.

A program walks along the sequence in tiles of 64 positions and keeps the keys and values of the last ones in shared memory.
Each is read once, and again only where a program starts. Programs have equal parts of all heads' positions, so a part may
run on from one head into the next. Before a head's first tile there are `back` tiles, which TMA fills with zeros. With
documents (walk_documents.py), one follows the other.

After an earlier pass, whose keys are others, the results of both are merged. Its output is copied in with the queries, to
where the merged output is then written from.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from longstride.attention.kernels.hopper import lane_tiles, walk_documents
from longstride.attention.kernels.hopper.ring import make_barriers, make_panels
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout
from longstride.attention.kernels.primitives import LOWEST


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
def weigh(scores, largest, tile, scale, DISTANCE: gl.constexpr):
    """The weights; 0 where the tile would be before the sequence."""
    if DISTANCE > 0:
        largest = gl.where(tile >= DISTANCE, largest, float("inf"))
    return gl.exp2(scores * scale - largest[:, None])


@gluon.jit
def lse_pointers(lse, batch, head, first, end, work, layout: gl.constexpr):
    """Pointers to the lse of a tile's queries, and the mask for them."""
    row = first + gl.arange(0, ROWS, layout)
    return lse + (batch * work.heads + head).to(gl.int64) * work.n + row, row < end


@gluon.jit
def walk_forward(q, k, v, output, output_rows, lse, work, scale, WALK: gl.constexpr, ACCUMULATE: gl.constexpr):
    """q, k, v, output: tensor descriptors. output_rows: the output as a Matrix, with documents. ACCUMULATE: merges with the
    output and lse of an earlier pass; not with documents."""
    dtype: gl.constexpr = q.dtype
    D: gl.constexpr = q.block_type.shape[4]
    FAR: gl.constexpr = WALK.far
    BACK: gl.constexpr = WALK.back
    AHEAD: gl.constexpr = WALK.ahead
    DOCUMENTS: gl.constexpr = WALK.documents
    RING: gl.constexpr = AHEAD + BACK
    STAGED: gl.constexpr = AHEAD + 1 if ACCUMULATE else 1
    layout: gl.constexpr = mma_layout(ROWS)
    sum_layout: gl.constexpr = mma_layout(D)
    lse_layout: gl.constexpr = gl.SliceLayout(1, layout)
    q_tiles = make_panels(dtype, AHEAD, ROWS, D, 1)
    k_tiles = make_panels(dtype, RING, ROWS, D, 1)
    v_tiles = make_panels(dtype, RING, ROWS, D, WALK.panels)
    staging = make_panels(dtype, STAGED, ROWS, D, WALK.panels)
    full = make_barriers(RING)
    fence_async_shared()
    start, end = lane_tiles.walk_range(work.positions)
    sources = q, k, v
    if ACCUMULATE:
        sources = q, k, v, output
    for slot in gl.static_range(RING):
        # The tiles before the program's own have keys and values for it, but no queries.
        batch, head, tile, tile_row, rows = walk_documents.place(start - BACK + slot, work, WALK, -BACK)
        if slot < BACK:
            tiles = lane_tiles.tiles_at((k_tiles, v_tiles), slot)
            fetch_tile((k, v), batch, head, tile, tile_row, True, full.index(slot), tiles, WALK)
        else:
            tiles = [lane_tiles.panels_at(q_tiles, slot - BACK)] + lane_tiles.tiles_at((k_tiles, v_tiles), slot)
            if ACCUMULATE:
                tiles = tiles + [lane_tiles.panels_at(staging, slot - BACK)]
            present = start - BACK + slot < end
            fetch_tile(sources, batch, head, tile, tile_row, present, full.index(slot), tiles, WALK)
    for slot in gl.static_range(BACK):
        mbarrier.wait(full.index(slot), 0)

    batch, head, tile, tile_row, rows = walk_documents.place(start, work, WALK, -BACK)
    ahead_batch, ahead_head, ahead_tile, ahead_row, _ = walk_documents.place(start + AHEAD, work, WALK, -BACK)
    for position in range(start, end):
        count = position - start
        # Not known to be 0 before the loop: masks that the compiler makes there would fill the registers.
        zero = count >> 30
        now = (count + BACK) % RING
        q_tile = lane_tiles.panels_at(q_tiles, count % AHEAD)
        staged = lane_tiles.panels_at(staging, count % STAGED)
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
            first_row = tile_row if DOCUMENTS else tile * ROWS
            end_row = tile_row + rows if DOCUMENTS else work.n
            if ACCUMULATE:
                pointers, valid = lse_pointers(lse, batch, head, first_row, end_row, work, lse_layout)
                earlier_lse = gl.load(pointers, mask=valid, other=float("-inf"))
            zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
            scores = ()
            for distance in gl.static_range(BACK + 1):
                keys = lane_tiles.panels_at(k_tiles, (count + BACK - distance) % RING)
                scores = scores + (lane_tiles.multiply_panels(q_tile, keys, zeros),)
            first = lane_tiles.mask_distances(warpgroup_mma_wait(BACK, deps=(scores[0],)), zero, 0, 0, FAR)
            largest = gl.max(first, 1)
            others = lane_tiles.wait_for(scores[1:])
            far_scores = ()
            for distance in gl.static_range(BACK, 0, -1):
                masked = lane_tiles.mask_distances(others[distance - 1], zero, distance * ROWS, 0, FAR)
                largest_there = gl.max(masked, 1)
                largest = gl.maximum(largest, gl.where(tile >= distance, largest_there, float("-inf")))
                far_scores = (masked,) + far_scores
            largest = gl.maximum(largest * scale, LOWEST)  # A score of -inf weighs 0.
            all_weights = weigh(first, largest, tile, scale, 0)
            sums = lane_tiles.empty_sums(WALK.panels, D, sum_layout)
            sums = lane_tiles.add_products(all_weights, lane_tiles.panels_at(v_tiles, now), sums, False)
            for distance in gl.static_range(1, BACK + 1):
                weights = weigh(far_scores[distance - 1], largest, tile, scale, distance)
                all_weights += weights
                values = lane_tiles.panels_at(v_tiles, (count + BACK - distance) % RING)
                sums = lane_tiles.add_products(weights, values, sums, True)
            weight = gl.sum(all_weights, 1)
            if ACCUMULATE:  # The earlier output counts as if its lse were the score of one more key.
                merged_max = gl.maximum(largest, earlier_lse)
                shrink = gl.exp2(largest - merged_max)
                earlier_weight = gl.exp2(earlier_lse - merged_max)
                weight = weight * shrink + earlier_weight
                largest = merged_max
            pointers, valid = lse_pointers(lse, batch, head, first_row, end_row, work, lse_layout)
            gl.store(pointers, largest + gl.log2(weight), mask=valid)
            inverse = 1.0 / gl.where(weight == 0, 1.0, weight)
            tma.store_wait(0)
            results = lane_tiles.scale_rows(lane_tiles.wait_for(sums), inverse * shrink if ACCUMULATE else inverse)
            if ACCUMULATE:
                earlier = lane_tiles.scale_rows(lane_tiles.load_panels(staged, sum_layout), inverse * earlier_weight)
                results = lane_tiles.add_panels(results, earlier)
            if DOCUMENTS and rows < ROWS:
                for panel in gl.static_range(WALK.panels):
                    walk_documents.store_rows(results[panel], output_rows, batch, head, tile_row, rows, panel)
            else:
                for panel in gl.static_range(WALK.panels):
                    staged[panel].store(results[panel].to(dtype))
                fence_async_shared()
                lane_tiles.copy_out(output, (batch, head, 0, first_row), staged)
        free = (count + BACK + AHEAD) % RING
        free_tiles = q_tile, lane_tiles.panels_at(k_tiles, free), lane_tiles.panels_at(v_tiles, free)
        if ACCUMULATE:
            free_tiles = free_tiles + (lane_tiles.panels_at(staging, (count + AHEAD) % STAGED),)
            if tile < 0:  # The place before may have written from there.
                tma.store_wait(0)
        present = position + AHEAD < end
        fetch_tile(sources, ahead_batch, ahead_head, ahead_tile, ahead_row, present, full.index(free), free_tiles, WALK)
        if DOCUMENTS:
            batch, head, tile, tile_row, rows = walk_documents.place(position + 1, work, WALK, -BACK)
            ahead_batch, ahead_head, ahead_tile, ahead_row, _ = walk_documents.place(position + 1 + AHEAD, work, WALK, -BACK)
        else:
            batch, head, tile = following_place(batch, head, tile, work, BACK)
            ahead_batch, ahead_head, ahead_tile = following_place(ahead_batch, ahead_head, ahead_tile, work, BACK)
    tma.store_wait(0)
