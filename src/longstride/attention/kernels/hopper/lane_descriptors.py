"""Lanes for TMA: tensor descriptors of them, and what the kernels for lanes and walks share.

A lane is a set of positions at equal distances, as in `patterns.geometry`. A tensor descriptor [batch, heads, lanes, length,
d] shows lanes in place, whatever the strides. TMA reads zeros past the end of a lane, and writes nothing there. Where n is
not a multiple of l there are two sets of lanes.

Values may be wider than queries and keys. They lie in shared memory in panels, each as wide as a query, and so do the output
and its gradient. Everything about them is a tuple, with one entry for each panel.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longstride.attention.kernels.arguments import compiled
from longstride.attention.kernels.hopper import choice
from longstride.attention.kernels.hopper.lane_settings import LaneSetting
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout, operand_layout
from longstride.attention.kernels.launch import Descriptor, Launch
from longstride.attention.kernels.settings import processors
from longstride.patterns.geometry import Lanes

APART = 16
"""Stride of a dimension with one entry, in elements. TMA wants a multiple of 16 bytes there, too."""


class LaneWork(NamedTuple):
    """`geometry.Lanes`, then what a launch computes: items, which are lanes of one head."""

    first: Any
    lanes: Any
    lane_stride: Any
    length: Any
    index_stride: Any
    items: Any
    heads: Any
    n: Any


class WalkWork(NamedTuple):
    """The positions of a walk: the tiles of one head after the other, with some tiles between heads."""

    positions: Any
    heads: Any
    n: Any
    tiles: Any  # of a head


class WalkTiles(NamedTuple):
    """How a walk passes over tiles of ROWS positions. Compiled in, as one constexpr."""

    far: Any  # Keys are up to so many positions back,
    back: Any  # which takes so many tiles before the queries' own.
    ahead: Any  # tiles that are copied before they are needed
    part: Any  # queries that backward computes at a time
    panels: Any  # of a value


class LaneTiles(NamedTuple):
    """How a kernel passes over lanes. Compiled in, as one constexpr."""

    near: Any  # Keys are at least so many indices back.
    stages: Any  # lanes in shared memory at a time; one in backward
    staged: Any  # tiles of results on their way out
    part: Any  # keys, or backward queries, that are computed at a time
    panels: Any  # of a value
    heads_first: Any  # whether neighbouring programs take neighbouring heads, not lanes


def lane_descriptor(x: Tensor, lanes: Lanes, block: tuple[int, int, int]) -> Descriptor:
    """Describes x [batch, heads, n, d] as [batch, heads, lanes, length, d]. block: what a copy takes of the last three."""
    # Where a dimension has one entry its stride may be any number, and not always one that TMA takes.
    batch, head, row = (x.stride(index) if x.shape[index] > 1 else APART for index in range(3))
    shape = *x.shape[:2], lanes.lanes, lanes.length, x.shape[3]
    strides = batch, head, lanes.lane_stride * row, lanes.index_stride * row, 1
    return Descriptor(x, lanes.first * x.stride(2), shape, strides, (1, 1, *block))


def heads_side_by_side(x: Tensor) -> bool:
    """Whether heads are closer in memory than positions, as in [batch, n, heads, d]."""
    return x.stride(1) < x.stride(2)


def value_panels(matrices: Sequence[Tensor]) -> int:
    """Of a value, the third matrix; the first is q."""
    panels, rest = divmod(matrices[2].shape[3], matrices[0].shape[3])
    assert panels
    assert not rest
    return panels


def walk_launch(
    kernel: Any, matrices: Sequence[Any], lse: Tensor, reach: int, settings: Callable[..., LaneSetting], *scales: float
) -> Launch:  # fmt: skip
    """The launch of a walk for Local(reach), whose programs share the positions of all heads. TMA copies those of `matrices`
    that are tensors, others are arguments as they are.

    Where heads are side by side in memory, each head has the same number of whole programs. These then read neighbouring
    addresses at about the same time.
    """
    batch, heads, n, d = matrices[0].shape
    panels = value_panels(matrices)
    setting = settings(d, panels)
    assert reach <= 2 * choice.ROWS
    assert lse.is_contiguous()
    whole = Lanes(0, 1, n, n, 1)
    tiles, back = -(-n // choice.ROWS), 1 if reach <= choice.ROWS else 2
    work = WalkWork(batch * heads * (tiles + back), heads, n, tiles)
    described = [lane_descriptor(x, whole, (1, choice.ROWS, d)) if isinstance(x, Tensor) else x for x in matrices]
    arguments = *described, lse, work, *scales
    walk = compiled(WalkTiles, far=reach, back=back, ahead=setting.stages, part=setting.part, panels=panels)
    programs = processors(lse.device) * setting.per_processor
    if heads_side_by_side(matrices[0]) and programs > batch * heads:
        programs -= programs % (batch * heads)
    constants = {"WALK": walk, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, min(programs, work.positions), arguments, constants)


def lane_launch(
    kernel: Any, settings: Callable[..., LaneSetting], matrices: Sequence[Tensor], results: Sequence[Tensor],
    lanes: Lanes, near: int, others: Sequence[Any], scales: Sequence[float], accumulate: bool, **flags: bool,
) -> Launch:  # fmt: skip
    """The launch for these lanes. TMA copies whole lanes of `matrices` in, and tiles of `results` out."""
    batch, heads, n, d = matrices[0].shape
    rows = max(choice.ROWS, 1 << (lanes.length - 1).bit_length())
    panels = value_panels(matrices)
    setting = settings(d, panels, rows, accumulate)
    work = LaneWork(*lanes, batch * heads * lanes.lanes, heads, n)
    boxes = [(x, rows) for x in matrices] + [(x, choice.ROWS) for x in results]
    descriptors = [lane_descriptor(x, lanes, (1, height, d)) for x, height in boxes]
    tiles = compiled(
        LaneTiles, near=near, stages=setting.stages, staged=setting.staged, part=setting.part,
        panels=panels, heads_first=heads_side_by_side(matrices[0]),
    )  # fmt: skip
    programs = min(work.items, processors(matrices[0].device) * setting.per_processor)
    constants = {"TILES": tiles, "ACCUMULATE": accumulate, **flags, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, programs, (*descriptors, *others, work, *scales), constants)


@gluon.jit
def locate_lane(item, work, HEADS_FIRST: gl.constexpr):
    """Batch, head and lane of an item. Neighbouring programs take what is neighbouring in memory."""
    heads, lanes = work.heads, work.lanes
    if HEADS_FIRST:
        return item // heads // lanes, item % heads, item // heads % lanes
    else:
        return item // lanes // heads, item // lanes % heads, item % lanes


@gluon.jit
def walk_place(position, work, BACK: gl.constexpr):
    """Batch, head and tile at a position; tiles from `work.tiles` on are between two heads."""
    head = position // (work.tiles + BACK)
    return head // work.heads, head % work.heads, position % (work.tiles + BACK)


@gluon.jit
def walk_range(positions):
    """The positions [start, end) of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    start = (program * positions.to(gl.int64) // programs).to(gl.int32)
    return start, ((program + 1) * positions.to(gl.int64) // programs).to(gl.int32)


@gluon.jit
def panels_at(tiles, stage):
    """Of each panel's tiles the one at a stage."""
    found = ()
    for panel in gl.static_range(len(tiles)):
        found = found + (tiles[panel].index(stage),)
    return found


@gluon.jit
def tiles_at(tiles, stage):
    """Of each tensor the panels at a stage."""
    found = ()
    for index in gl.static_range(len(tiles)):
        found = found + (panels_at(tiles[index], stage),)
    return found


@gluon.jit
def rows_of(panels, START: gl.constexpr, COUNT: gl.constexpr = ROWS):
    """These rows of each panel."""
    found = ()
    for panel in gl.static_range(len(panels)):
        found = found + (panels[panel].slice(START, COUNT),)
    return found


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
def wait_for(sums):
    """The sums, once their products are complete, and all that were started before them."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=sums),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def load_panels(panels, layout: gl.constexpr):
    """Panels in shared memory, as tensors."""
    loaded = ()
    for panel in gl.static_range(len(panels)):
        loaded = loaded + (panels[panel].load(layout),)
    return loaded


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
