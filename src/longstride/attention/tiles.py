"""Covers a pattern's pairs with dense rectangles of the score matrix, after rearranging the sequence into lanes.

A pattern is computed one leaf after the other, in the lanes of `patterns.geometry`; Summary in one lane of all positions,
with only the summary cells as keys: a staircase of whole blocks.

`arrange` covers the lanes with tiles: rectangles of queries and keys, many of one shape, so that a batched matrix product
computes them together. A pair of several leaves of a union belongs to the first of them and is masked in the others.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.patterns import Pattern, Summary
from longstride.patterns.geometry import Geometry, Lanes, geometry, lane_sets

# Tile sizes. Small tiles waste little at the diagonal, large ones run matrix products at their full rate; docs/log.md has
# the measurements.
MIN_ROWS = 16
"""The fewest rows of a tile."""
NARROW_ROWS = 64
"""The most rows of a tile of a narrow window."""
WIDE_REACH = 512
"""The reach from which a window counts as wide and gets square tiles."""
MAX_SIDE = 512
"""The largest side of a square tile."""
TILES_PER_WINDOW = 16
"""Square tiles along a window. Half of each tile on the diagonal is wasted, but many small tiles take longer."""


class Rectangle(NamedTuple):
    """A block of scores in a lane. Rectangles of one shape and one family are equally spaced."""

    query: int
    rows: int
    key: int
    columns: int
    first: bool
    """Whether this is the leaf's first rectangle with these queries."""
    family: Hashable


@dataclass(frozen=True, eq=False)
class Tiles:
    """`count` rectangles of one shape. Number t starts at query + t * query_shift and at key + t * key_shift."""

    query: int
    query_shift: int
    rows: int
    key: int
    key_shift: int
    columns: int
    count: int
    masked: bool
    """Whether some of its pairs are masked."""
    uniform: bool
    """Whether every tile of every lane has the same mask."""
    fresh: bool
    """Whether no earlier tile has these queries, so that their accumulators can be overwritten."""


@dataclass(frozen=True)
class Arrangement:
    """One leaf in lanes of equal length, and the tiles that cover its pairs there."""

    geometry: Geometry
    lanes: Lanes = field(compare=False)
    """All of them, or a group that is computed together. Groups have the same tiles and masks, and are equal."""
    offset: int
    """Queries before this position are not there."""
    tiles: tuple[Tiles, ...] = ()

    def in_lanes(self, x: Tensor) -> Tensor:
        """[batch, n, d] as the view [batch, lanes, length, d]."""
        lanes, row = self.lanes, x.stride(1)
        strides = (x.stride(0), lanes.lane_stride * row, lanes.index_stride * row, x.stride(2))
        shape = (x.shape[0], lanes.lanes, lanes.length, x.shape[2])
        return x.as_strided(shape, strides, x.storage_offset() + lanes.first * row)

    def load_queries(self, x: Tensor) -> Tensor:
        """[batch, n, d] -> [batch * lanes, length, d]: a view if possible, otherwise a copy."""
        return self.in_lanes(x).flatten(0, 1)

    def store_queries(self, rows: Tensor, x: Tensor) -> None:
        """Writes the result of `load_queries` back to x, if it was a copy."""
        target = self.in_lanes(x)
        if rows.data_ptr() != target.data_ptr():
            target.copy_(rows.view(target.shape))

    def load_keys(self, x: Tensor) -> Tensor:
        """As `load_queries`, for keys. Summary takes only its cells: [batch, n, d] -> [batch, cells, d]."""
        cells = self._cells(x)
        return self.load_queries(x) if cells is None else x.index_select(1, cells)

    def store_keys(self, rows: Tensor, x: Tensor) -> None:
        cells = self._cells(x)
        if cells is None:
            self.store_queries(rows, x)
        else:
            x[:, cells] = rows

    def _cells(self, x: Tensor) -> Tensor | None:
        """Returns the positions of the summary cells, if these are the keys."""
        if (summary := self.geometry.summary) is None:
            return None
        return summary.cell_position(torch.arange(summary.cells_before(x.shape[1]), device=x.device))  # type: ignore[no-any-return]

    def visible(self, tiles: Tiles, lane: Tensor, tile: Tensor) -> Tensor:
        """Returns the visible pairs in these tiles of these lanes: bool [lanes, tiles, rows, columns]."""
        lane, tile = lane[:, None, None, None], tile[:, None, None]
        row = torch.arange(tiles.rows, device=lane.device)[:, None]
        column = torch.arange(tiles.columns, device=lane.device)
        query = self.lanes.position(lane, tiles.query + tile * tiles.query_shift + row)
        key = self.key_position(lane, tiles.key + tile * tiles.key_shift + column)
        seen: Tensor = self.geometry.computes(query, key)
        return seen & (query >= self.offset) if self.offset else seen

    def key_position(self, lane: Any, index: Any) -> Any:
        """Returns the positions of a lane's keys; ints or tensors. For Summary, `index` counts cells."""
        summary = self.geometry.summary
        return summary.cell_position(index) if summary else self.lanes.position(lane, index)


@lru_cache(maxsize=256)
def arrange(pattern: Pattern, n: int, offset: int = 0) -> tuple[Arrangement, ...]:
    """Returns arrangements whose tiles contain every pair of the pattern, for queries from `offset` on, exactly once."""
    arrangements = []
    for record in geometry(pattern, n, by_leaf=True):
        for lanes in lane_sets(record, n) if record.own else [Lanes(0, 1, n, n, 1)]:
            for part in _lanes_from(offset, lanes):
                arrangement = Arrangement(record, part, offset)
                arrangements.append(replace(arrangement, tiles=_cover(arrangement)))
    return tuple(arrangements)


def _lanes_from(offset: int, lanes: Lanes) -> Iterator[Lanes]:
    """Yields the lanes that have positions from `offset` on. A block that begins before it is apart from the others."""
    if lanes.index_stride > 1 or lanes.lanes == 1:
        yield lanes
        return
    skipped, rest = divmod(max(0, offset - lanes.first), lanes.lane_stride)
    parts = [(skipped, 1), (skipped + 1, lanes.lanes - skipped - 1)] if rest else [(skipped, lanes.lanes - skipped)]
    for lane, count in parts:
        if count > 0 and lane < lanes.lanes:
            yield lanes._replace(first=lanes.position(lane, 0), lanes=count)


def _cover(arrangement: Arrangement) -> tuple[Tiles, ...]:
    record, lanes, offset = arrangement.geometry, arrangement.lanes, arrangement.offset
    # The first index that some lane has from `offset` on: in the last lane, which begins latest.
    first = max(0, -((lanes.position(lanes.lanes - 1, 0) - offset) // lanes.index_stride))
    cover = _staircase(record.summary, lanes.length, first) if record.summary else _window(lanes.length, record.far, first)
    alike: dict[Hashable, list[Rectangle]] = {}
    for rectangle in cover:
        cut = lanes.position(0, rectangle.query) < offset
        shape = rectangle.rows, rectangle.columns, rectangle.first, rectangle.family, cut
        alike.setdefault(shape, []).append(rectangle)
    return tuple(_make_tiles(arrangement, group) for group in alike.values())


def _window(length: int, far: int, start: int) -> Iterator[Rectangle]:
    """Covers a window of `far` positions back in a lane, for the queries from `start` on."""
    back = min(far, length - 1)
    wide = back >= WIDE_REACH
    height = _side(back, MAX_SIDE) if wide else max(MIN_ROWS, min(NARROW_ROWS, back + 1))
    for query in range(start, length, height):
        rows = min(height, length - query)
        # A wide window is cut into squares, so that tiles computed together share no key.
        first = max(0, query - back)
        for keys in _split_keys(first, query, query + rows, height) if wide else [range(first, query + rows)]:
            yield Rectangle(query, rows, keys[0], len(keys), keys[-1] == query + rows - 1, family=query - keys[0])


def _staircase(summary: Summary, n: int, start: int) -> Iterator[Rectangle]:
    """Covers the summary cells up to each query, from the block of the query `start` on. Keys are counted in cells."""
    height = _side(n, MAX_SIDE * isqrt(summary.l // summary.c)) // summary.l * summary.l or min(summary.l, MAX_SIDE)
    whole_blocks = height % summary.l == 0
    width = height // summary.l * summary.c if whole_blocks else MAX_SIDE
    for query in range(start // summary.l * summary.l, n, height):
        rows = min(height, n - query)
        edge = summary.cells_before(query)
        for index, keys in enumerate(_split_keys(0, edge, summary.cells_before(query + rows), width)):
            family = edge - keys[0] if whole_blocks else (query, keys[0])
            yield Rectangle(query, rows, keys[0], len(keys), index == 0, family)


def _side(extent: int, most: int) -> int:
    """Returns the height of a tile in a window or staircase of this extent."""
    return min(most, max(-(-extent // TILES_PER_WINDOW), MAX_SIDE // 4))


def _split_keys(first: int, edge: int, end: int, width: int) -> Iterator[range]:
    """Splits the keys [first, end) into ranges of at most `width`, with a cut at `edge`: beyond it pairs may be masked."""
    for begin in range(edge, end, width):
        yield range(begin, min(begin + width, end))
    for stop in range(edge, first, -width):
        yield range(max(first, stop - width), stop)


def _make_tiles(arrangement: Arrangement, alike: list[Rectangle]) -> Tiles:
    """Combines equally spaced rectangles into one Tiles. `masked` and `uniform` follow from the first rectangle."""
    first, second = alike[0], alike[min(1, len(alike) - 1)]
    query_shift, key_shift = second.query - first.query, second.key - first.key
    assert all(b.query - a.query == query_shift and b.key - a.key == key_shift for a, b in pairwise(alike))
    lanes, record = arrangement.lanes, arrangement.geometry
    queries = range(lanes.position(0, first.query), lanes.position(0, first.query + first.rows - 1) + 1)
    last_key = first.key + first.columns - 1
    keys = range(arrangement.key_position(0, first.key), arrangement.key_position(0, last_key) + 1)
    shifts = [lanes.lane_stride] * (lanes.lanes > 1) + [query_shift * lanes.index_stride] * (len(alike) > 1)
    cut = queries[0] < arrangement.offset
    uniform = not cut and all(leaf.repeats(shift) for leaf in record.excluded for shift in shifts)
    nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
    partial = nearest < record.near * lanes.index_stride or farthest > record.far * lanes.index_stride
    masked = partial or not uniform or any(leaf.touches(queries, keys) for leaf in record.excluded)
    fresh = first.first and not record.near and not record.excluded
    return Tiles(
        first.query, query_shift, first.rows, first.key, key_shift, first.columns, len(alike), masked, uniform, fresh
    )
