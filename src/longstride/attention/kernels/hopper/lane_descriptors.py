"""Tensor descriptors of lanes for TMA, and the arguments of the kernels for lanes and walks.

A lane is a set of positions at equal distances, as in `patterns.geometry`. A tensor descriptor [batch, heads, lanes, length,
d] shows lanes in place, whatever the strides. TMA reads zeros past the end of a lane, and writes nothing there. Where n is
not a multiple of l there are two sets of lanes.
"""

from typing import Any, NamedTuple

from torch import Tensor

from longstride.attention.kernels.launch import Descriptor
from longstride.patterns.geometry import Lanes

APART = 16
"""Stride of a dimension with one entry, in elements. TMA wants a multiple of 16 bytes there, too."""


class LaneLaunch(NamedTuple):
    """`geometry.Lanes`, then what a launch computes: items, which are lanes of one head."""

    first: Any
    lanes: Any
    lane_stride: Any
    length: Any
    index_stride: Any
    items: Any
    heads: Any
    n: Any


class WalkLaunch(NamedTuple):
    """The positions of a walk: the tiles of one head after the other, with some tiles between heads, or documents."""

    positions: Any
    heads: Any
    n: Any
    tiles: Any  # of a head; with documents, of all of them, and backward those between
    table: Any = None  # with documents, for each tile a `work.WalkTile`, int32 [tiles, fields]


class WalkTiles(NamedTuple):
    """How a walk passes over tiles of ROWS positions. Compiled in, as one constexpr."""

    far: Any  # Keys are up to so many positions back,
    back: Any  # which takes so many tiles before the queries' own.
    ahead: Any  # tiles that are copied before they are needed
    part: Any  # queries that backward computes at a time
    panels: Any  # of a value
    documents: Any  # whether there are documents


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
