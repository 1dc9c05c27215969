"""Cache slots of a head: where it stores the keys and values that later queries will see.

Each position has one slot, or none if no later query sees it. Local keeps a ring of l + 1 positions, Block the current
block, Summary only its cells; Column and Dense keep all positions, since some later query sees each. The leaves of a union
share slots: with a Column or Dense leaf all positions are kept once; otherwise a summary cell has its own slot and is not in
the ring. Slots are closed form in the position, so that a kernel computes them too (`kernels/cached.py`).
"""

from functools import lru_cache

import torch
from torch import Tensor

from longstride.patterns import Block, Dilated, Leaf, Pattern, Summary

NO_SLOT = -1
"""The slot of a position that is not kept."""


class Slots:
    """The slots of one head, for positions 0 to `context` - 1."""

    def __init__(self, pattern: Pattern, context: int) -> None:
        self.pattern, self.context = pattern, context
        leaves = pattern.leaves
        self.keeps_all = any(isinstance(leaf, Dilated) and leaf.reach is None for leaf in leaves)
        self.summaries = () if self.keeps_all else tuple(leaf for leaf in leaves if isinstance(leaf, Summary))
        self.starts = []
        """The first slot of each summary's cells."""
        count = 0
        for summary in self.summaries:
            self.starts.append(count)
            count += summary.cells_before(context)
        self.ring_start = count
        self.ring = 0 if self.keeps_all else min(context, max((_ring_size(leaf) for leaf in leaves), default=0))
        self.count = context if self.keeps_all else count + self.ring

    @property
    def most(self) -> int:
        """The most keys that a query sees, summed over the leaves."""
        return self.most_between(0, self.context - 1)

    def most_between(self, first: int, last: int) -> int:
        """As `most`, for the queries `first` to `last`."""
        return sum(_key_count(leaf, _query_with_most_keys(leaf, first, last)) for leaf in self.pattern.leaves)

    def of(self, positions: Tensor) -> Tensor:
        """Returns the slot of each position."""
        if self.keeps_all:
            return positions
        slots = self.ring_start + positions % self.ring if self.ring else torch.full_like(positions, NO_SLOT)
        for summary, start in reversed(list(zip(self.summaries, self.starts))):
            cell = positions % summary.l - summary.cells.start
            inside = (cell >= 0) & (cell < summary.c)
            slots = torch.where(inside, start + positions // summary.l * summary.c + cell, slots)
        return slots

    def kept(self, n: int) -> Tensor:
        """Returns those of the first n positions whose slot has not been overwritten."""
        positions = torch.arange(n)
        slots = self.of(positions)
        newest = positions >= n - self.ring
        return positions[(slots >= 0) & ((slots < self.ring_start) | newest)] if not self.keeps_all else positions

    def seen(self, query: int) -> Tensor:
        """Returns the slots of all keys that a query sees, its own position included."""
        leaves = self.pattern.leaves
        keys = _keys(leaves[0], query)
        if len(leaves) > 1:
            keys = torch.cat([keys, *(_keys(leaf, query) for leaf in leaves[1:])]).unique()  # type: ignore[no-untyped-call]
        return self.of(keys)

    def listed(self, queries: Tensor) -> Tensor:
        """Returns the slots that queries see, leaf by leaf: [queries, most], -1 for padding and keys of an earlier leaf."""
        by_leaf: list[Tensor] = []
        leaves, query = self.pattern.leaves, queries[:, None]
        for leaf_index, leaf in enumerate(leaves):
            lengths = torch.tensor([_key_count(leaf, position) for position in queries.tolist()])[:, None]
            step = torch.arange(int(lengths.max()))
            if isinstance(leaf, Summary):
                keys = (step // leaf.c * leaf.l + leaf.cells.start + step % leaf.c).expand(len(queries), -1)
            else:
                keys = query - step * (leaf.step if isinstance(leaf, Dilated) else 1)
            valid = step < lengths
            for earlier in leaves[:leaf_index]:
                valid = valid & ~earlier.sees(query, keys)
            by_leaf.append(torch.where(valid, self.of(keys), NO_SLOT))
        return torch.cat(by_leaf, 1)


@lru_cache(maxsize=1024)
def slots(pattern: Pattern, context: int) -> Slots:
    return Slots(pattern, context)


def _ring_size(leaf: Leaf) -> int:
    """Returns how many of the newest positions a leaf needs."""
    if isinstance(leaf, Block):
        return leaf.l
    if isinstance(leaf, Dilated):
        assert leaf.reach is not None
        return leaf.reach + 1
    return 0


def _query_with_most_keys(leaf: Leaf, first: int, last: int) -> int:
    """Returns the query from `first` to `last` that sees the most keys."""
    if isinstance(leaf, Block) and last // leaf.l > first // leaf.l:
        return last // leaf.l * leaf.l - 1  # The last position of a block.
    return last


def _key_count(leaf: Leaf, query: int) -> int:
    """Returns how many keys of a leaf a query sees."""
    if isinstance(leaf, Dilated):
        return (query if leaf.reach is None else min(query, leaf.reach)) // leaf.step + 1
    if isinstance(leaf, Block):
        return query % leaf.l + 1
    assert isinstance(leaf, Summary)
    return leaf.cells_before(query + 1)


def _keys(leaf: Leaf, query: int) -> Tensor:
    """Returns the positions of the keys of a leaf that a query sees."""
    if isinstance(leaf, Dilated):
        farthest = query if leaf.reach is None else min(query, leaf.reach)
        return torch.arange(query - farthest // leaf.step * leaf.step, query + 1, leaf.step)
    if isinstance(leaf, Block):
        return torch.arange(query // leaf.l * leaf.l, query + 1)
    assert isinstance(leaf, Summary)
    index = torch.arange(leaf.cells_before(query + 1))
    return index // leaf.c * leaf.l + leaf.cells.start + index % leaf.c
