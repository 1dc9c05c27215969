"""The geometry of a pattern: lanes, a window inside each lane, summary cells. Every implementation reads this record.

As in section 5.5 of the paper, the sequence is divided into lanes in which a leaf's pairs are close together. Element
`index` of a lane is position lane * lane_stride + index * index_stride, so a lane is a strided view, not a copy.

    Dilated   a lane for each residue class modulo the step; in it a window of `near` to `far` positions back
    Block     a lane for each block, or for several short ones; a query sees its own block up to itself
    Summary   the lanes of Block; a query sees the summary cells of all lanes before its own, and its own lane's up to itself

A record is one leaf or, in the Triton kernels, Block and Summary of one length together. The records of a union are
computed one after the other. If several leaves have a pair, the first record with that pair computes it, and later records
exclude it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from longstride.patterns.leaves import Block, Dilated, Summary
from longstride.patterns.pattern import Leaf, Pattern, Union, known_leaves

LANE = 128
"""Blocks shorter than this share a lane of at most this length, so that a lane fills a tile."""


class Lanes(NamedTuple):
    """Lanes of equal length."""

    first: int
    """Position of the first lane's first element."""
    lanes: int
    """Number of lanes."""
    lane_stride: int
    """Distance between the first elements of neighbouring lanes."""
    length: int
    """Positions in a lane."""
    index_stride: int
    """Distance between neighbours in a lane."""

    def position(self, lane: Any, index: Any) -> Any:
        """Returns the positions of a lane's indices in the sequence; ints or tensors."""
        return self.first + lane * self.lane_stride + index * self.index_stride


def block_lanes(n: int, l: int) -> list[Lanes]:
    """Returns the blocks of Block(l); the last one is shorter where l does not divide n."""
    sets = Lanes(0, n // l, l, l, 1), Lanes(n // l * l, 1, l, n % l, 1)
    return [lanes for lanes in sets if lanes.lanes and lanes.length]


def column_lanes(n: int, l: int) -> list[Lanes]:
    """Returns the residue classes of Column(l); the first n % l are one position longer."""
    sets = Lanes(0, n % l, 1, n // l + 1, l), Lanes(n % l, l - n % l, 1, n // l, l)
    return [lanes for lanes in sets if lanes.lanes and lanes.length]


def lane_sets(record: Any, n: int) -> list[Lanes]:
    """Returns the residue classes, or single blocks, of a record or of a kernel's row for it, in sets of equal length."""
    return column_lanes(n, record.index_stride) if record.lane_stride == 1 else block_lanes(n, record.block)


class Geometry(NamedTuple):
    """A record: the pairs of a sequence of n positions that one pass computes.

    Values above n are clamped to n, so they fit 32 bits if n does.
    """

    lanes: int
    """Number of lanes."""
    lane_stride: int
    """Distance between the first positions of neighbouring lanes."""
    index_stride: int
    """Distance between neighbours in a lane."""
    limit: int
    """Length of the longest lane; the last lanes may be shorter."""
    near: int
    far: int
    """A query sees keys of its lane that are `near` to `far` indices back."""
    own: int
    """1 if a query sees its own block, 0 if it sees only the summary cells there."""
    block: int
    """Length of a block; n where there are no blocks."""
    cells: int
    """Summary cells of a block; 0 if there are none."""
    first_cell: int
    """Offset of the first summary cell in a block."""
    leaves: tuple[Leaf, ...]
    """The leaves that this record stands for."""
    excluded: tuple[Leaf, ...]
    """Leaves of earlier records whose pairs must be left out here."""

    @property
    def summary(self) -> Summary | None:
        """The leaf whose summary cells are seen."""
        leaf = self.leaves[-1]
        return leaf if isinstance(leaf, Summary) else None

    def computes(self, query: Any, key: Any) -> Any:
        """Whether this record has a pair that no earlier one has; positions as tensors that broadcast."""
        seen = Union(self.leaves).sees(query, key) & (query - key >= self.near * self.index_stride)
        for leaf in self.excluded:
            seen = seen & ~leaf.sees(query, key)
        return seen


@lru_cache(maxsize=1024)
def geometry(pattern: Pattern, n: int, by_leaf: bool = False) -> tuple[Geometry, ...]:
    """Returns the records of a pattern at length n, in the order in which they are computed. by_leaf: one for each leaf."""
    records: list[Geometry] = []
    leaves = list(known_leaves("geometry", pattern))
    earlier: tuple[Leaf, ...] = ()
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, Dilated):
            records.append(_dilated(leaf, earlier, n))
        else:
            assert isinstance(leaf, Block | Summary), f"{leaf!r} has no geometry"
            same_length = (other for other in leaves if isinstance(other, Summary) and other.l == leaf.l and not by_leaf)
            summary = next(same_length, None) if isinstance(leaf, Block) else leaf
            records.append(_fixed(leaf, summary, earlier, n))
            leaves = [other for other in leaves if other != summary]
        earlier += records[-1].leaves
    return tuple(records)


def _dilated(leaf: Dilated, earlier: Sequence[Leaf], n: int) -> Geometry:
    step = min(leaf.step, n)
    near, excluded = 0, []
    for other in earlier:
        # An earlier window whose step divides ours has all our pairs up to its reach: ours begins just beyond it.
        if isinstance(other, Dilated) and leaf.step % other.step == 0 and other.reach is not None:
            near = max(near, min(other.reach, n) // step + 1)
        else:
            excluded.append(other)
    far = (n if leaf.reach is None else min(leaf.reach, n)) // step
    return Geometry(
        lanes=step, lane_stride=1, index_stride=step, limit=-(-n // step), near=near, far=far, own=1, block=n, cells=0,
        first_cell=0, leaves=(leaf,), excluded=tuple(excluded),
    )  # fmt: skip


def _fixed(leaf: Block | Summary, summary: Summary | None, earlier: Sequence[Leaf], n: int) -> Geometry:
    """A block, a summary, or a block and the summary of its length."""
    block = min(leaf.l, n)
    lane_stride = block * max(1, LANE // block)
    cells, first_cell = (min(summary.c, n), min(summary.cells.start, n)) if summary else (0, 0)
    return Geometry(
        lanes=-(-n // lane_stride), lane_stride=lane_stride, index_stride=1, limit=min(lane_stride, n), near=0, far=n,
        own=int(isinstance(leaf, Block)), block=block, cells=cells, first_cell=first_cell,
        leaves=(leaf,) if summary in (None, leaf) else (leaf, summary), excluded=tuple(earlier),
    )  # fmt: skip
