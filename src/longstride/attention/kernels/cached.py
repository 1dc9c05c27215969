"""The cache slots that a query sees, listed by a kernel: `attention.slots` in Triton.

A query walks along each leaf of its pattern in turn: the k-th key of a leaf has a position in closed form, a position has
one slot, and a key that an earlier leaf sees is left out. `list_seen` writes these slots for some positions ahead, so that
nothing is divided while the network waits. `table` has what it needs, by pattern:

    leaves, each LEAF_FIELDS long: kind, step or l, reach or c, the first cell, the first slot of its cells
    then: whether everything is kept, the length of the ring, its first slot
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.attention.kernels.primitives import cell_index, cell_position
from longstride.attention.slots import Slots

DILATED, BLOCK, SUMMARY, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LEAF_FIELDS = tl.constexpr(5)
HEAD_FIELDS = tl.constexpr(3)


def table(heads: Sequence[Slots], leaves: int) -> Tensor:
    """int32 [patterns, leaves * LEAF_FIELDS + HEAD_FIELDS]"""
    return torch.tensor([_row(head, leaves) for head in heads], dtype=torch.int32)


def _row(head: Slots, leaves: int) -> list[int]:
    row: list[int] = []
    starts = dict(zip(head.summaries, head.starts))
    for leaf in head.leaves:
        if leaf.summary:
            row += [SUMMARY.value, leaf.block, leaf.cells, leaf.first_cell, starts.get(leaf.summary, 0)]
        elif leaf.by_residue:
            row += [DILATED.value, leaf.index_stride, leaf.far * leaf.index_stride, 0, 0]
        else:
            row += [BLOCK.value, leaf.block, 1, 0, 0]
    for _ in range(leaves - len(head.leaves)):
        row += [NONE.value, 1, 1, 0, 0]
    return [*row, int(head.keeps_all), head.ring, head.ring_start]


@triton.jit
def walk_length(kind, size, part, first, query):
    """How many keys a leaf has for the query."""
    if kind == DILATED:
        length = tl.minimum(query, part) // size + 1
    elif kind == BLOCK:
        length = query % size + 1
    elif kind == SUMMARY:
        length = query // size * part + tl.minimum(part, tl.maximum(0, query % size + 1 - first))
    else:
        length = query * 0
    return length


@triton.jit
def walk_position(kind, size, part, first, query, number):
    """The position of its keys, newest first where that is simpler."""
    if kind == SUMMARY:
        position = cell_position(number, part, size, first)
    elif kind == DILATED:
        position = query - number * size
    else:
        position = query - number
    return position


@triton.jit
def leaf_sees(kind, size, part, first, query, position):
    """Whether a leaf sees positions up to the query's."""
    if kind == DILATED:
        seen = ((query - position) % size == 0) & (query - position <= part)
    elif kind == BLOCK:
        seen = position // size == query // size
    elif kind == SUMMARY:
        seen = (position % size >= first) & (position % size < first + part)
    else:
        seen = position < 0
    return seen


@triton.jit
def slot_of(row, position, LEAVES: tl.constexpr):
    """Where positions lie in a head's cache, below 0 if nowhere. `row`: of the table, for all, or one for each position."""
    everything = tl.load(row + LEAVES * LEAF_FIELDS)
    ring = tl.load(row + LEAVES * LEAF_FIELDS + 1)
    ring_start = tl.load(row + LEAVES * LEAF_FIELDS + 2)
    slot = tl.where(ring > 0, ring_start + position % tl.maximum(ring, 1), -1)
    for leaf in tl.static_range(LEAVES):
        fields = row + (LEAVES - 1 - leaf) * LEAF_FIELDS  # The first that has a cell keeps it.
        kind = tl.load(fields)
        size = tl.load(fields + 1)
        part = tl.load(fields + 2)
        index, inside = cell_index(position, part, size, tl.load(fields + 3))
        slot = tl.where((kind == SUMMARY) & inside, tl.load(fields + 4) + index, slot)
    return tl.where(everything > 0, position, slot)


@triton.jit
def list_seen(
    table, position_first, seen, counts, own, most, HEADS: tl.constexpr, LEAVES: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """For some positions from a first one on, what a query there sees: the slots, leaf by leaf, but its own, which is `own`.

    seen [positions, HEADS, most], below 0 where an earlier leaf has the key, and past the end; counts and own [positions,
    HEADS]. A program writes BLOCK_SIZE of each leaf.
    """
    job, block = tl.program_id(0), tl.program_id(1)
    query = tl.load(position_first) + job // HEADS
    row = table + job % HEADS * (LEAVES * LEAF_FIELDS + HEAD_FIELDS)
    listed = seen + job.to(tl.int64) * most
    number = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    before = query * 0
    itself = query < 0
    for leaf in tl.static_range(LEAVES):
        fields = row + leaf * LEAF_FIELDS
        kind, size, part, first = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
        length = walk_length(kind, size, part, first, query)
        itself |= leaf_sees(kind, size, part, first, query, query)
        position = walk_position(kind, size, part, first, query, number)
        wanted = position != query
        for earlier in tl.static_range(leaf):
            others = row + earlier * LEAF_FIELDS
            wanted &= ~leaf_sees(
                tl.load(others), tl.load(others + 1), tl.load(others + 2), tl.load(others + 3), query, position
            )  # fmt: skip
        slot = tl.where(wanted, slot_of(row, position, LEAVES), -1)
        tl.store(listed + before + number, slot, number < length)
        before += length
    tl.store(listed + number, -1, (number >= before) & (number < most))
    if block == 0:
        tl.store(counts + job, before)
        tl.store(own + job, tl.where(itself, slot_of(row, query, LEAVES), -1))
