"""What the kernels for lanes and walks share: where an item lies, tiles in panels, copies by TMA, and products.

Values may be wider than queries and keys. They lie in shared memory in panels, each as wide as a query, and so do the output
and its gradient. Everything about them is a tuple or a list, which Triton does not tell apart, with one entry for each
panel. The kernels for tiles share that part.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout, operand_layout


@gluon.jit
def locate_lane(item, work, HEADS_FIRST: gl.constexpr):
    """Batch, head and lane of an item. Neighbouring programs take what is neighbouring in memory."""
    heads, lanes = work.heads, work.lanes
    if HEADS_FIRST:
        return item // heads // lanes, item % heads, item // heads % lanes
    else:
        return item // lanes // heads, item // lanes % heads, item % lanes


@gluon.jit
def walk_range(positions):
    """The positions [start, end) of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    start = (program * positions.to(gl.int64) // programs).to(gl.int32)
    return start, ((program + 1) * positions.to(gl.int64) // programs).to(gl.int32)


@gluon.jit
def panels_at(tiles, stage):
    """For each panel, its tile at a stage."""
    return [panel.index(stage) for panel in tiles]


@gluon.jit
def tiles_at(tiles, stage):
    """For each tensor, its panels at a stage."""
    return [panels_at(panels, stage) for panels in tiles]


@gluon.jit
def rows_of(panels, START: gl.constexpr, COUNT: gl.constexpr = ROWS):
    """These rows of each panel."""
    return [panel.slice(START, COUNT) for panel in panels]


@gluon.jit
def empty_sums(COUNT: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """ROWS rows of zeros, for each panel or tile."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (gl.zeros([ROWS, D], gl.float32, layout),)
    return sums


@gluon.jit
def mask_distances(scores, zero, OFFSET: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr):
    """-inf for pairs that are not NEAR to FAR apart; row r is OFFSET + r - c from key c.

    `zero` is 0; where that is not known before a loop, the compiler does not make masks there, which fill registers.
    """
    layout: gl.constexpr = scores.type.layout
    row = zero + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    if OFFSET - ROWS + 1 < NEAR:
        scores = gl.where(column[None, :] <= row[:, None] + (OFFSET - NEAR), scores, float("-inf"))
    if OFFSET + ROWS - 1 > FAR:
        scores = gl.where(column[None, :] >= row[:, None] + (OFFSET - FAR), scores, float("-inf"))
    return scores


@gluon.jit
def add_products(left, panels, sums, use_acc):
    """Starts the product of a tensor with each panel."""
    layout: gl.constexpr = operand_layout(mma_layout(panels[0].shape[1]))
    operand = gl.convert_layout(left.to(panels[0].dtype), layout)
    result = ()
    for panel in gl.static_range(len(panels)):
        result = result + (warpgroup_mma(operand, panels[panel], sums[panel], use_acc=use_acc, is_async=True),)
    return result


@gluon.jit
def multiply_panels(left, right, zeros):
    """Starts the product of two tensors in panels, the second one transposed."""
    result = zeros
    for panel in gl.static_range(len(left)):
        result = warpgroup_mma(left[panel], right[panel].permute((1, 0)), result, use_acc=panel > 0, is_async=True)
    return result


@gluon.jit
def wait_for(sums):
    """The sums, once their products are complete, and all that were started before them."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=sums),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def scale_rows(sums, factors):
    """Each panel of the sums, its rows multiplied by their factors."""
    layout: gl.constexpr = sums[0].type.layout
    factors = gl.convert_layout(factors, gl.SliceLayout(1, layout))[:, None]
    return [panel * factors for panel in sums]


@gluon.jit
def add_panels(sums, others):
    """The sums of panels."""
    result = ()
    for panel in gl.static_range(len(sums)):
        result = result + (sums[panel] + others[panel],)
    return result


@gluon.jit
def load_panels(panels, layout: gl.constexpr):
    """Panels in shared memory, as tensors."""
    return [panel.load(layout) for panel in panels]


@gluon.jit
def row_products(panels, others):
    """For each row the sum of the products of its entries in both, which are tensors."""
    total = gl.sum(panels[0].to(gl.float32) * others[0].to(gl.float32), 1)
    for panel in gl.static_range(1, len(panels)):
        total += gl.sum(panels[panel].to(gl.float32) * others[panel].to(gl.float32), 1)
    return total


@gluon.jit
def copy_in(descriptor, place, barrier, panels, present, FIRST: gl.constexpr = 0):
    """Starts to copy rows of a lane into panels [rows, d], from panel FIRST on. place: batch, head, lane and first row."""
    for panel in gl.static_range(len(panels)):
        target = panels[panel]._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
        source = place + ((FIRST + panel) * descriptor.block_shape[4],)
        tma.async_copy_global_to_shared(descriptor, source, barrier, target, pred=present)


@gluon.jit
def copy_all(descriptors, place, barrier, tiles, present):
    """Starts to copy rows of a lane of each tensor. The panels of a tile lie in a tuple."""
    for index in gl.static_range(len(descriptors)):
        copy_in(descriptors[index], place, barrier, tiles[index], present)


@gluon.constexpr_function
def count_panels(tiles):
    return sum(len(panels) for panels in tiles)


@gluon.jit
def expect_tiles(barrier, tiles, present, FURTHER: gl.constexpr = 0):
    """The barrier completes when all panels of the tiles are copied, and as many FURTHER ones."""
    PANELS: gl.constexpr = count_panels(tiles) + FURTHER
    mbarrier.expect(barrier, PANELS * tiles[0][0].shape[0] * tiles[0][0].shape[1] * 2, pred=present)


@gluon.jit
def copy_out(descriptor, place, panels, FIRST: gl.constexpr = 0):
    """Starts to copy panels back."""
    for panel in gl.static_range(len(panels)):
        source = panels[panel]._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
        target = place + ((FIRST + panel) * descriptor.block_shape[4],)
        tma.async_copy_shared_to_global(descriptor, target, source)
