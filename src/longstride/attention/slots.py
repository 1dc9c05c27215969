"""What a head still needs of the past: where it keeps the keys and values that later queries will see.

Each position has one slot, or none if nothing later sees it. Local keeps a ring of l + 1, Block the current block, Summary
its cells alone; Column and Dense keep everything, since each position is seen by some later query. A union shares: with a
Column in it, all its leaves read from the one place that has everything; and what is a summary cell lies there, not in the
ring. All of it is closed form in the position, so that a kernel can do the same sums (`kernels/cached.py`).
"""

from functools import lru_cache

import torch
from torch import Tensor

from longstride.patterns import Block, Dilated, Leaf, Pattern, Summary

NOWHERE = -1


class Slots:
    """Those of one head, for positions from 0 to `context` - 1."""

    def __init__(self, pattern: Pattern, context: int) -> None:
        self.pattern, self.context = pattern, context
        leaves = pattern.leaves
        self.everything = any(isinstance(leaf, Dilated) and leaf.reach is None for leaf in leaves)
        self.summaries = () if self.everything else tuple(leaf for leaf in leaves if isinstance(leaf, Summary))
        self.starts = []
        """The first slot of each summary's cells."""
        count = 0
        for summary in self.summaries:
            self.starts.append(count)
            count += summary.cells_before(context)
        self.ring_start = count
        self.ring = 0 if self.everything else min(context, max((_ring(leaf) for leaf in leaves), default=0))
        self.count = context if self.everything else count + self.ring

    @property
    def most(self) -> int:
        """Keys that a query may see, those of several leaves counted for each."""
        return self.most_between(0, self.context - 1)

    def most_between(self, first: int, last: int) -> int:
        """As `most`, for queries from `first` to `last`."""
        return sum(_length(leaf, _fullest(leaf, first, last)) for leaf in self.pattern.leaves)

    def of(self, positions: Tensor) -> Tensor:
        """The slot of each."""
        if self.everything:
            return positions
        slots = self.ring_start + positions % self.ring if self.ring else torch.full_like(positions, NOWHERE)
        for summary, start in reversed(list(zip(self.summaries, self.starts))):
            cell = positions % summary.l - summary.cells.start
            inside = (cell >= 0) & (cell < summary.c)
            slots = torch.where(inside, start + positions // summary.l * summary.c + cell, slots)
        return slots

    def kept(self, n: int) -> Tensor:
        """Of the first n positions those that still have a slot; no two have the same."""
        positions = torch.arange(n)
        slots = self.of(positions)
        newest = positions >= n - self.ring
        return positions[(slots >= 0) & ((slots < self.ring_start) | newest)] if not self.everything else positions

    def seen(self, query: int) -> Tensor:
        """The slots of all keys that a query sees, itself among them."""
        leaves = self.pattern.leaves
        keys = _keys(leaves[0], query)
        if len(leaves) > 1:
            keys = torch.cat([keys, *(_keys(leaf, query) for leaf in leaves[1:])]).unique()  # type: ignore[no-untyped-call]
        return self.of(keys)

    def listed(self, queries: Tensor) -> Tensor:
        """What some queries see, leaf by leaf: [queries, most], below 0 where there is no key, or an earlier leaf has it."""
        found: list[Tensor] = []
        leaves, query = self.pattern.leaves, queries[:, None]
        for number, leaf in enumerate(leaves):
            lengths = torch.tensor([_length(leaf, one) for one in queries.tolist()])[:, None]
            step = torch.arange(int(lengths.max()))
            if isinstance(leaf, Summary):
                keys = (step // leaf.c * leaf.l + leaf.cells.start + step % leaf.c).expand(len(queries), -1)
            else:
                keys = query - step * (leaf.step if isinstance(leaf, Dilated) else 1)
            there = step < lengths
            for earlier in leaves[:number]:
                there = there & ~earlier.sees(query, keys)
            found.append(torch.where(there, self.of(keys), NOWHERE))
        return torch.cat(found, 1)


@lru_cache(maxsize=1024)
def slots(pattern: Pattern, context: int) -> Slots:
    return Slots(pattern, context)


def _ring(leaf: Leaf) -> int:
    """How many of the newest positions a leaf needs."""
    if isinstance(leaf, Block):
        return leaf.l
    if isinstance(leaf, Dilated):
        assert leaf.reach is not None
        return leaf.reach + 1
    return 0


def _fullest(leaf: Leaf, first: int, last: int) -> int:
    """The query from `first` to `last` that sees most."""
    if isinstance(leaf, Block) and last // leaf.l > first // leaf.l:
        return last // leaf.l * leaf.l - 1  # The end of a block.
    return last


def _length(leaf: Leaf, query: int) -> int:
    """How many keys a leaf has for a query."""
    if isinstance(leaf, Dilated):
        return (query if leaf.reach is None else min(query, leaf.reach)) // leaf.step + 1
    if isinstance(leaf, Block):
        return query % leaf.l + 1
    assert isinstance(leaf, Summary)
    return leaf.cells_before(query + 1)


def _keys(leaf: Leaf, query: int) -> Tensor:
    """The positions that a leaf sees."""
    if isinstance(leaf, Dilated):
        farthest = query if leaf.reach is None else min(query, leaf.reach)
        return torch.arange(query - farthest // leaf.step * leaf.step, query + 1, leaf.step)
    if isinstance(leaf, Block):
        return torch.arange(query // leaf.l * leaf.l, query + 1)
    assert isinstance(leaf, Summary)
    number = torch.arange(leaf.cells_before(query + 1))
    return number // leaf.c * leaf.l + leaf.cells.start + number % leaf.c
