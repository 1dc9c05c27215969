"""Working set of the blocked implementation: groups of lanes, chunks of their tiles, and scratch memory for products.

Shapes: heads come one at a time, [batch, n, d]. Lanes of one are [lanes, length, d], where lanes includes the batch; tiles
of those [tiles, rows, d] for queries and [tiles, columns, d] for keys, where tiles includes the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention.tiles import Arrangement, Tiles, arrange
from longstride.patterns import Pattern


class Budget(NamedTuple):
    """Positions and scores that are computed at a time: on a CPU what fits its cache, elsewhere what fills the device."""

    positions: int
    scores: int


CPU_BUDGET = Budget(positions=2**13, scores=2**19)
DEVICE_BUDGET = Budget(positions=2**20, scores=2**25)
LEAST_FACTOR = 1e-37
"""Smaller factors of a product are multiplied apart: they may be 0 in float32, and `baddbmm` with alpha = 0 drops NaN."""


def budget(device: torch.device) -> Budget:
    return CPU_BUDGET if device.type == "cpu" else DEVICE_BUDGET


def lane_groups(pattern: Pattern, q: Tensor, offset: int) -> Iterator[Arrangement]:
    """Yields the arrangements of a pattern, their lanes in groups that fit the budget. q: a head's, [batch, n, d]."""
    for arrangement in arrange(pattern, q.shape[1], offset):
        lanes = arrangement.lanes
        at_once = max(1, budget(q.device).positions // (len(q) * lanes.length))
        for first in range(0, lanes.lanes, at_once):
            count = min(at_once, lanes.lanes - first)
            yield replace(arrangement, lanes=lanes._replace(first=lanes.position(first, 0), lanes=count))


def tile_chunks(group: Arrangement, q: Tensor, exact: bool) -> Iterator[Chunk]:
    """Yields the tiles of a group of lanes in chunks that fit the budget of scores. q: its queries, [lanes, length, d]."""
    lane = torch.arange(group.lanes.lanes, device=q.device).repeat(len(q) // group.lanes.lanes)
    for tiles in group.tiles:
        at_once = max(1, budget(q.device).scores // (len(q) * tiles.rows * tiles.columns))
        shared = tiles.masked and tiles.uniform and tiles.count * group.lanes.lanes > 1
        for first in range(0, tiles.count, at_once):
            count = min(at_once, tiles.count - first)
            cap = None
            if shared:
                cap = _shared_cap(group, tiles, q.dtype, q.device)
            elif tiles.masked:
                tile = torch.arange(first, first + count, device=q.device)
                cap = _score_cap(group.visible(tiles, lane, tile), q.dtype)
            yield Chunk(tiles, first, count, cap, exact)


@lru_cache(maxsize=64)
def _shared_cap(arrangement: Arrangement, tiles: Tiles, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the cap that all of these tiles share, in every group of lanes."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return _score_cap(arrangement.visible(tiles, zero, zero), dtype)


def _score_cap(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the upper bound of each score: +inf at visible pairs, -inf at masked ones, [tiles, rows, columns]."""
    cap = torch.full(visible.shape, -torch.inf, dtype=dtype, device=visible.device)
    return cap.masked_fill_(visible, torch.inf).flatten(0, 1)


@dataclass(frozen=True)
class Chunk:
    """Tiles of one shape, in all lanes of a group, that are computed together."""

    tiles: Tiles
    first: int
    count: int
    cap: Tensor | None
    exact: bool = False
    """Whether masked pairs are excluded from all sums even where inputs are NaN or infinite."""

    @property
    def seen(self) -> Tensor | None:
        """Visible pairs, bool [tiles, rows, columns], if sums are exact; None if all are visible or sums are not exact."""
        return None if self.cap is None or not self.exact else self.cap > 0

    def queries(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> [lanes * tiles, rows, d]."""
        return self.query_windows(x).flatten(0, 1)

    def query_windows(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> the view [lanes, tiles, rows, d]."""
        tiles = self.tiles
        return _windows(x, tiles.query + self.first * tiles.query_shift, tiles.query_shift, tiles.rows, self.count)

    def keys(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> [lanes * tiles, columns, d]."""
        tiles = self.tiles
        start = tiles.key + self.first * tiles.key_shift
        return _windows(x, start, tiles.key_shift, tiles.columns, self.count).flatten(0, 1)

    def add_to_keys(self, total: Tensor, left: Tensor, right: Tensor, factor: float, scratch: Scratch) -> None:
        """Adds left right * factor, [lanes * tiles, columns, d], to `total`.

        Neighbouring tiles may share keys, so it adds one shift's width at a time.
        """
        tiles = self.tiles
        start = tiles.key + self.first * tiles.key_shift
        width = tiles.key_shift if self.count > 1 else tiles.columns
        for offset in range(0, tiles.columns, width):
            columns = left[:, offset : offset + width]
            target = _windows(total, start + offset, tiles.key_shift, columns.shape[1], self.count)
            seen = None if self.seen is None else self.seen.transpose(1, 2)[:, offset : offset + width]
            scratch.add_product(target, columns, right, factor, fresh=False, seen=seen)

    def scores(self, queries: Tensor, keys: Tensor, scale: float, scratch: Scratch) -> Tensor:
        """Returns q k^T * scale, with -inf at masked pairs."""
        scores = scratch.product("scores", queries, keys.transpose(1, 2), scale)
        if self.cap is None:
            return scores
        # A minimum rather than adding -inf: +inf by overflow plus -inf would be NaN. `fmin` also replaces NaN: by -inf at
        # masked pairs, and by +inf, whose weight is NaN, at visible ones.
        return (torch.fmin if self.exact else torch.minimum)(scores, self.cap, out=scores)

    def zero_masked(self, x: Tensor, largest: Tensor) -> Tensor:
        """Zeroes x at masked pairs, and where a query's largest score is that of padding, if sums are exact.

        Otherwise these are 0 already, unless an input is not finite.
        """
        if self.exact:
            padding = largest == torch.finfo(x.dtype).max
            x.masked_fill_(padding if self.cap is None else padding | (self.cap < 0), 0)
        return x


class Scratch:
    """Reusable memory for the products of a chunk: on a CPU, allocating it costs more time than computing the product."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.empty = torch.empty(0, dtype=dtype, device=device)
        self.buffers: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor, factor: float = 1) -> Tensor:
        """Returns left right * factor, a batch of matrix products, in the buffer of that name."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        size = shape[0] * shape[1] * shape[2]
        if self.buffers.get(name, self.empty).numel() < size:
            self.buffers[name] = self.empty.new_empty(size)
        result = self.buffers[name][:size].view(shape)
        if abs(factor) < LEAST_FACTOR:
            return torch.bmm(left, right, out=result).mul_(factor)
        return torch.baddbmm(result, left, right, beta=0, alpha=factor, out=result)

    def add_product(
        self, total: Tensor, left: Tensor, right: Tensor, factor: float, fresh: bool, seen: Tensor | None = None
    ) -> None:
        """Adds left right * factor to a view [lanes, tiles, ...], or overwrites it if `fresh`.

        seen: visible entries of left. The others are 0, and not even 0 * NaN is added for them.
        """
        if abs(factor) < LEAST_FACTOR:
            left, factor = left * factor, 1
        if seen is not None:
            self.add_product(total, left, right.masked_fill(~right.isfinite(), 0), factor, fresh)
            total.add_(nonfinite_products(left, right, seen).view(total.shape), alpha=factor)
            return
        if total.is_contiguous():
            place = total.flatten(0, 1)
            torch.baddbmm(place, left, right, beta=0 if fresh else 1, alpha=factor, out=place)
        elif fresh:
            total.copy_(self.product("sum", left, right, factor).view(total.shape))
        else:
            total.add_(self.product("sum", left, right).view(total.shape), alpha=factor)


def nonfinite_products(left: Tensor, right: Tensor, seen: Tensor) -> Tensor:
    """Returns the NaN and infinite sums of left right that come from NaN and infinity in right, and 0 elsewhere.

    Only visible pairs take part. Matrix products count the terms that are +inf, -inf and NaN.
    """
    infinite = right.isinf()
    signs, infinities = left.sign().masked_fill_(left.isnan(), 0), right.sign().masked_fill_(~infinite, 0)
    difference, total = signs @ infinities, signs.abs() @ infinities.abs()
    nans = (seen & (left == 0)).to(left.dtype) @ infinite.to(left.dtype)  # 0 * inf
    nans += seen.to(left.dtype) @ right.isnan().to(left.dtype)
    sums = torch.zeros_like(total).masked_fill_(total + difference > 0, torch.inf)
    sums += torch.zeros_like(total).masked_fill_(total - difference > 0, -torch.inf)
    return sums.masked_fill_(nans > 0, torch.nan)


def _windows(x: Tensor, start: int, shift: int, size: int, count: int) -> Tensor:
    """[lanes, length, d] -> the view [lanes, count, size, d] of windows that start `shift` apart."""
    if count == 1:
        return x[:, None, start : start + size]
    return x[:, start : start + (count - 1) * shift + size].unfold(1, size, shift).transpose(2, 3)
