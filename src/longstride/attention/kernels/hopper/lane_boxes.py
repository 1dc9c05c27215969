"""Lanes as boxes of Hopper's tensor copy engine: views to copy them, and programs that find them.

A lane is a set of positions at equal distances, as in `patterns.geometry`. Seen as a tensor
[batch, heads, lanes, length, d] it needs no copy, whatever the strides, and the engine itself fills with zeros what a box
has past the end of a lane, and leaves it out when it writes. Where n is no multiple of l there are two sets of lanes.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longstride.attention.kernels.launch import Box
from longstride.attention.kernels.settings import processors
from longstride.patterns.geometry import Lanes

TILE = 64
"""Queries, or keys, that a warpgroup computes at a time."""
APART = 16
"""Numbers that stand for the distance of what has no neighbour; the copy engine wants a multiple of 16 bytes there, too."""


def lane_box(x: Tensor, lanes: Lanes, rows: int) -> Box:
    """A view of x [batch, heads, n, d] as lanes, of which a copy takes `rows` positions."""
    batch, heads, _, d = x.shape
    row = distance(x, 2)
    shape = batch, heads, lanes.lanes, lanes.length, d
    strides = distance(x, 0), distance(x, 1), lanes.lane_stride * row, lanes.index_stride * row, 1
    return Box(x, lanes.first * x.stride(2), shape, strides, (1, 1, 1, rows, d))


def distance(x: Tensor, dimension: int) -> int:
    """The stride; where a dimension has one entry it is any number, and not always one that the copy engine takes."""
    return x.stride(dimension) if x.shape[dimension] > 1 else APART


def lane_rows(lanes: Lanes, most: int) -> int:
    """The rows of a box that holds a lane whole."""
    rows = max(TILE, 1 << (lanes.length - 1).bit_length())
    assert rows <= most
    return rows


def heads_side_by_side(x: Tensor) -> bool:
    """Whether heads are closer in memory than positions, as in [batch, n, heads, d]; then neighbours should take those."""
    return x.stride(1) < x.stride(2)


def walking_programs(x: Tensor, per_processor: int, positions: int) -> int:
    """How many programs share the positions of all heads, one after the other.

    Where heads are side by side in memory each has the same number of whole programs, so that they walk abreast and what
    one fetches of a row of memory is near to what the others do.
    """
    programs = processors(x.device) * per_processor
    heads = x.shape[0] * x.shape[1]
    if heads_side_by_side(x) and programs > heads:
        programs -= programs % heads
    return min(positions, programs)


@gluon.jit
def locate(item, heads, lanes, HEADS_FIRST: gl.constexpr):
    """Batch, head and lane of an item. Neighbouring programs take what is neighbouring in memory."""
    if HEADS_FIRST:
        return item // heads // lanes, item % heads, item // heads % lanes
    else:
        return item // lanes // heads, item // lanes % heads, item % lanes


@gluon.jit
def copy_in(box, batch, head, lane, index, barrier, tile, present):
    """Starts to copy rows of a lane, from `index` on, into a tile [rows, d]."""
    place = tile._reinterpret(box.dtype, box.block_shape, box.layout)
    gl.nvidia.hopper.tma.async_copy_global_to_shared(box, [batch, head, lane, index, 0], barrier, place, pred=present)


@gluon.jit
def copy_out(box, batch, head, lane, index, tile):
    """Starts to write a tile back."""
    place = tile._reinterpret(box.dtype, box.block_shape, box.layout)
    gl.nvidia.hopper.tma.async_copy_shared_to_global(box, [batch, head, lane, index, 0], place)
