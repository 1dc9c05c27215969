"""Cache slots of a head: where it stores the keys and values that later queries will see.

Each position has one slot, or none if no later query sees it. Local keeps a ring of l + 1 positions, Block the current
block, Summary only its cells; Column and Dense keep all positions, since some later query sees each, and so does a window or
block as long as the context. The leaves of a union share slots: if one keeps all positions, they are kept once; otherwise a
summary cell has its own slot and is not in the ring. Slots are closed form in the position, so that a kernel computes them
too (`sampling/kernels/slots.py`).
"""

from functools import lru_cache

import torch
from torch import Tensor

from longstride.patterns import Pattern
from longstride.patterns.geometry import Geometry, geometry

NO_SLOT = -1
"""The slot of a position that is not kept."""


class Slots:
    """The slots of one head, for positions 0 to `context` - 1."""

    def __init__(self, pattern: Pattern, context: int) -> None:
        self.pattern, self.context = pattern, context
        self.leaves = geometry(pattern, context, by_leaf=True)
        """The geometry of each leaf."""
        self.keeps_all = any(_window_size(leaf) == context for leaf in self.leaves)
        self.summaries = [leaf.summary for leaf in self.leaves if leaf.summary and not self.keeps_all]
        self.starts = []
        """The first slot of each summary's cells."""
        count = 0
        for summary in self.summaries:
            self.starts.append(count)
            count += summary.cells_before(context)
        self.ring_start = count
        self.ring = 0 if self.keeps_all else max(map(_window_size, self.leaves))
        self.count = context if self.keeps_all else count + self.ring

    @property
    def most(self) -> int:
        """The most keys that a query sees, summed over the leaves."""
        return self.most_between(0, self.context - 1)

    def most_between(self, first: int, last: int) -> int:
        """As `most`, for the queries `first` to `last`."""
        return sum(_key_count(leaf, _query_with_most_keys(leaf, first, last)) for leaf in self.leaves)

    def of(self, positions: Tensor) -> Tensor:
        """Returns the slot of each position."""
        if self.keeps_all:
            return positions
        slots = self.ring_start + positions % self.ring if self.ring else torch.full_like(positions, NO_SLOT)
        for summary, start in reversed(list(zip(self.summaries, self.starts))):
            is_cell = summary.sees(positions, positions)
            slots = torch.where(is_cell, start + summary.cell_index(positions), slots)
        return slots

    def kept(self, n: int) -> Tensor:
        """Returns those of the first n positions whose slot has not been overwritten."""
        positions = torch.arange(n)
        return positions[positions >= n - self.lifetimes(positions)]

    def lifetimes(self, positions: Tensor) -> Tensor:
        """Returns after how many positions, its own included, the slot of each position is overwritten; at least `context`
        if never, and 0 if it has none."""
        if self.keeps_all:
            return torch.full_like(positions, self.context)
        slots = self.of(positions)
        return torch.where(slots < 0, 0, torch.where(slots < self.ring_start, self.context, self.ring))

    def seen(self, query: int) -> Tensor:
        """Returns the slots of all keys that a query sees, its own position included."""
        slots = self.listed(torch.tensor([query]))[0]
        return slots[slots >= 0]

    def listed(self, queries: Tensor) -> Tensor:
        """Returns the slots that queries see, leaf by leaf: [queries, most], -1 for padding and keys of an earlier leaf."""
        parts: list[Tensor] = []
        query = queries[:, None]
        for leaf in self.leaves:
            lengths = torch.tensor([_key_count(leaf, position) for position in queries.tolist()])[:, None]
            key_index = torch.arange(int(lengths.max()))
            if leaf.summary:
                keys = leaf.summary.cell_position(key_index).expand(len(queries), -1)
            else:
                keys = query - key_index * leaf.index_stride
            valid = (key_index < lengths) & leaf.computes(query, keys)
            parts.append(torch.where(valid, self.of(keys), NO_SLOT))
        return torch.cat(parts, 1)


@lru_cache(maxsize=1024)
def slots(pattern: Pattern, context: int) -> Slots:
    return Slots(pattern, context)


def _window_size(leaf: Geometry) -> int:
    """Returns how many of the newest positions a leaf needs."""
    if leaf.summary:
        return 0
    if leaf.far < max(1, leaf.limit - 1):
        return leaf.far * leaf.index_stride + 1
    return leaf.block  # A query sees its lane back to the start, or to the start of its block.


def _query_with_most_keys(leaf: Geometry, first: int, last: int) -> int:
    """Returns the query from `first` to `last` that sees the most keys."""
    if not leaf.summary and last // leaf.block > first // leaf.block:
        return last // leaf.block * leaf.block - 1  # The last position of a block.
    return last


def _key_count(leaf: Geometry, query: int) -> int:
    """Returns how many keys of a leaf a query sees."""
    if leaf.summary:
        return leaf.summary.cells_before(query + 1)
    return min(query % leaf.block // leaf.index_stride, leaf.far) + 1
