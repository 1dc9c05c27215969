"""The cache slots that a query sees, listed by a kernel: `model.slots` in Triton.

A query walks along each leaf of its pattern in turn: the k-th key of a leaf has a position in closed form, a position has
one slot, and a key that an earlier leaf sees is left out. `list_seen` writes these slots for some positions ahead, so that
nothing is divided while the network waits. `table` has what it needs, by pattern: a `CachedLeaf` for each leaf, then whether
everything is kept, the length of the ring, and its first slot.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.attention.kernels.primitives import cell_position, is_summary_cell
from longstride.model.slots import Slots

LEAF_FIELDS = tl.constexpr(6)
HEAD_FIELDS = tl.constexpr(3)


class CachedLeaf(NamedTuple):
    """Numbers of a leaf's `Geometry`, which documents them, and the first slot of its summary cells."""

    block: Any
    index_stride: Any
    far: Any
    cells: Any
    first_cell: Any
    start: Any


def table(heads: Sequence[Slots], leaves: int) -> Tensor:
    """int32 [patterns, leaves * LEAF_FIELDS + HEAD_FIELDS]"""
    return torch.tensor([_row(head, leaves) for head in heads], dtype=torch.int32)


def _row(head: Slots, leaves: int) -> list[int]:
    starts = dict(zip(head.summaries, head.starts))
    row: list[int] = []
    for leaf in head.leaves:
        start = starts.get(leaf.summary, 0)
        row += CachedLeaf(leaf.block, leaf.index_stride, leaf.far, leaf.cells, leaf.first_cell, start)
    nothing = CachedLeaf(block=1, index_stride=1, far=-1, cells=0, first_cell=0, start=0)
    return [*row, *nothing * (leaves - len(head.leaves)), int(head.keeps_all), head.ring, head.ring_start]


@triton.jit
def read_leaf(row, number):
    row += number * LEAF_FIELDS
    return CachedLeaf(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )  # fmt: skip


@triton.jit
def walk(leaf, query, number):
    """How many keys a leaf has for the query, and the position of its number-th key."""
    if leaf.cells > 0:
        begun = tl.maximum(0, query % leaf.block + 1 - leaf.first_cell)
        length = query // leaf.block * leaf.cells + tl.minimum(leaf.cells, begun)
        position = cell_position(number, leaf.cells, leaf.block, leaf.first_cell)
    else:
        length = tl.minimum(query % leaf.block // leaf.index_stride, leaf.far) + 1
        position = query - number * leaf.index_stride
    return length, position


@triton.jit
def is_cell(leaf, position):
    return is_summary_cell(position % leaf.block, leaf.cells, leaf.first_cell)


@triton.jit
def leaf_sees(leaf, query, position):
    """Whether a leaf sees positions up to the query's."""
    distance = query - position
    in_window = (distance % leaf.index_stride == 0) & (distance <= leaf.far * leaf.index_stride)
    in_window &= query // leaf.block == position // leaf.block
    return tl.where(leaf.cells > 0, is_cell(leaf, position), in_window)


@triton.jit
def slot_of(row, position, LEAVES: tl.constexpr):
    """Where positions lie in a head's cache, below 0 if nowhere. `row`: of the table."""
    everything = tl.load(row + LEAVES * LEAF_FIELDS)
    ring = tl.load(row + LEAVES * LEAF_FIELDS + 1)
    ring_start = tl.load(row + LEAVES * LEAF_FIELDS + 2)
    slot = tl.where(ring > 0, ring_start + position % tl.maximum(ring, 1), -1)
    for number in tl.static_range(LEAVES):
        leaf = read_leaf(row, LEAVES - 1 - number)  # The first that has a cell keeps it.
        index = position // leaf.block * leaf.cells + position % leaf.block - leaf.first_cell
        slot = tl.where(is_cell(leaf, position), leaf.start + index, slot)
    return tl.where(everything > 0, position, slot)


@triton.jit
def list_seen(
    table, position, seen, counts, own, most, HEADS: tl.constexpr, LEAVES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    EACH: tl.constexpr = False,
):  # fmt: skip
    """For some positions, what a query there sees: the slots, leaf by leaf, but its own, which is `own`.

    position: the first of them, or with EACH all of them. seen [positions, HEADS, most], below 0 where an earlier leaf has
    the key, and past the end; counts and own [positions, HEADS]. A program writes BLOCK_SIZE of each leaf.
    """
    job, block = tl.program_id(0), tl.program_id(1)
    query = tl.load(position + job // HEADS) if EACH else tl.load(position) + job // HEADS
    row = table + job % HEADS * (LEAVES * LEAF_FIELDS + HEAD_FIELDS)
    listed = seen + job.to(tl.int64) * most
    number = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    before = query * 0
    itself = query < 0
    for index in tl.static_range(LEAVES):
        leaf = read_leaf(row, index)
        length, position = walk(leaf, query, number)
        itself |= leaf_sees(leaf, query, query)
        wanted = position != query
        for earlier in tl.static_range(index):
            wanted &= ~leaf_sees(read_leaf(row, earlier), query, position)
        tl.store(listed + before + number, tl.where(wanted, slot_of(row, position, LEAVES), -1), number < length)
        before += length
    tl.store(listed + number, -1, (number >= before) & (number < most))
    if block == 0:
        tl.store(counts + job, before)
        tl.store(own + job, tl.where(itself, slot_of(row, query, LEAVES), -1))
