"""One new query against its visible cached keys: the sums of `attention.slots`, for kernels.

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


@triton.jit
def pause(NANOSECONDS: tl.constexpr):
    """About so long, and not more than twice."""
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.b32 $0, 0;", "=r,r", [NANOSECONDS], tl.int32, False, 1)


@triton.jit
def load_values(base, slot, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[slots, BLOCK_D]; zeros for slots below 0. Past the first cache, which may have what lay in a slot before."""
    across = tl.arange(0, BLOCK_D)[None, :]
    there = (slot >= 0)[:, None] & (across < D)
    return tl.load(base + slot.to(tl.int64)[:, None] * D + across, there, 0.0, cache_modifier=".cg")


@triton.jit
def load_keys(base, slot, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `load_values`, in two halves, [slots, BLOCK_D / 2] each. Values are as wide in half as many bytes, and what has one
    shape gets one layout: in that of values, threads would read every second 16 bytes of keys, and all of them twice."""
    HALF: tl.constexpr = BLOCK_D // 2
    across = tl.arange(0, HALF)[None, :]
    there = (slot >= 0)[:, None]
    place = base + slot.to(tl.int64)[:, None] * D + across
    low = tl.load(place, there & (across < D), 0.0, cache_modifier=".cg")
    high = tl.load(place + HALF, there & (HALF + across < D), 0.0, cache_modifier=".cg")
    return low, high


@triton.jit
def scores(query, slot, key):
    """Of one query, in halves as keys are: [slots]."""
    products = key[0] * query[0][None, :] + key[1] * query[1][None, :]
    return tl.where(slot >= 0, tl.sum(products, 1), float("-inf"))


@triton.jit
def load_part(
    listed, most, split, keys, values, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PAUSE: tl.constexpr, D_QK: tl.constexpr,
    D_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The first keys of part `split` of those listed: (slots, keys, values) for each of CHUNKS. Nanoseconds of PAUSE between
    them leave room for others' loads."""
    slots = ()  # All of them before any key, which would wait for its own.
    for chunk in tl.static_range(CHUNKS):
        number = (split * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
        slots = slots + (tl.load(listed + number, number < most, -1),)
    part = ()
    for chunk in tl.static_range(CHUNKS):
        slot = slots[chunk]
        key = load_keys(keys, slot, D_QK, BLOCK_QK)
        part = part + ((slot, key, load_values(values, slot, D_V, BLOCK_V)),)
        if PAUSE > 0 and chunk + 1 < CHUNKS:
            pause(PAUSE)
    return part


@triton.jit
def attend_listed(
    query, listed, count, keys, values, begin, stride, TILE: tl.constexpr, STAGES: tl.constexpr, D_QK: tl.constexpr,
    D_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What the keys listed from `begin` on give, as `attend_part`: TILE at a time, `stride` apart, STAGES loaded at once.

    Each row of a tile has a softmax of its own until the end: so rows meet once, not in every tile.
    """
    row = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, BLOCK_V], tl.float32)
    for start in tl.range(begin, count, stride, num_stages=STAGES):
        slot = tl.load(listed + start + row, start + row < count, -1)
        key = load_keys(keys, slot, D_QK, BLOCK_QK)
        value = load_values(values, slot, D_V, BLOCK_V).to(tl.float32)
        score = scores(query, slot, key)
        larger = tl.maximum(largest, score)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        fade = tl.exp2(largest - safe)
        weight = tl.exp2(score - safe)
        total = total * fade + weight
        result = result * fade[:, None] + weight[:, None] * value
        largest = larger
    top = tl.max(largest, 0)
    share = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.sum(total * share, 0), tl.sum(result * share[:, None], 0)


@triton.jit
def attend_part(
    query, part, listed, count, keys, values, split, REST: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What part `split` of a query's keys gives: the largest score, the sum of weights, and of weighted values [BLOCK_V].

    query: halves [BLOCK_QK / 2], float32, with the scale and log2(e) in them. `part`: from `load_part`. Of what is listed
    beyond those of all parts, if there is such a REST, each has a share.
    """
    found = ()
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        found = found + (scores(query, part[chunk][0], part[chunk][1]),)
        largest = tl.maximum(largest, found[chunk])
    top = tl.max(largest, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.zeros([CHUNK], tl.float32)
    results = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        weight = tl.exp2(found[chunk] - safe)
        totals += weight
        results += weight[:, None] * part[chunk][2].to(tl.float32)
    total, result = tl.sum(totals, 0), tl.sum(results, 0)
    if REST:
        FIRST: tl.constexpr = SPLITS * CHUNKS * CHUNK
        if count > FIRST:
            rest_top, rest_total, rest = attend_listed(
                query, listed, count, keys, values, FIRST + split * TILE, SPLITS * TILE, TILE, 1, D_QK, D_V, BLOCK_QK,
                BLOCK_V,
            )  # fmt: skip
            top, total, result = together(top, total, result, rest_top, rest_total, rest)
    return top, total, result


@triton.jit
def together(top, total, result, other_top, other_total, other_result):
    """What two parts of the keys give."""
    highest = tl.maximum(top, other_top)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    share, other_share = tl.exp2(top - safe), tl.exp2(other_top - safe)
    return highest, total * share + other_total * other_share, result * share + other_result * other_share
