"""Attention of one new query to the cached keys of its head, in parts that several programs share.

Words: a slot is a row of a head's cache; `visible` points to the slots that the query sees, as `list_seen` writes them.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import os
from typing import Any, NamedTuple, TypeVar

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Group = TypeVar("Group", bound=NamedTuple)


class HeadSizes(NamedTuple):
    """Constants of a head; `block_*` are padded to powers of two."""

    d_qk: Any
    d_v: Any
    block_qk: Any
    """At least 2: keys are loaded in two halves."""
    block_v: Any
    scale: Any
    """Of the scores, times log2(e): weights are powers of 2."""


class KeySplit(NamedTuple):
    """Constants: how programs share the keys that a query sees in a head."""

    splits: Any
    """Programs per head and stream."""
    chunks: Any
    """Chunks that a program loads before it has the query."""
    chunk: Any
    """Keys per chunk."""
    tile: Any
    """Keys per tile of the remaining ones, which are loaded once the query is there."""
    has_remaining: Any
    """Whether there may be more keys than fit into all programs' chunks."""
    pause: Any
    """Nanoseconds between the loads of two chunks, so that the loads of other programs are not delayed."""
    has_attention_programs: Any
    """Whether there are extra programs for attention, beside those for the matrix products."""


class HeadCache(NamedTuple):
    """Pointers to a head's keys [slots, d_qk] and values [slots, d_v]."""

    k: Any
    v: Any


class Chunks(NamedTuple):
    """The slots, keys and values that a program has loaded, each a tuple of chunks; a slot below 0 is to be skipped."""

    slots: Any
    k: Any
    """Each in two halves, see `load_keys`."""
    v: Any


class SoftmaxState(NamedTuple):
    """A softmax over some of the keys, so that two of them can be merged."""

    maximum: Any
    """The largest score, in base 2; -inf without keys."""
    total: Any
    """Sum of the weights 2^(score - maximum)."""
    accumulator: Any
    """Sum of the weighted values."""


def constants(sizes: Group) -> Group:
    """Returns a group of numbers as a `tl.constexpr` argument of kernels; unchanged for Triton's interpreter."""
    return sizes if INTERPRETED else sizes._make(map(tl.constexpr, sizes))


@triton.jit
def pause(NANOSECONDS: tl.constexpr):
    """Sleeps for NANOSECONDS, at most twice that."""
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.b32 $0, 0;", "=r,r", [NANOSECONDS], tl.int32, False, 1)


@triton.jit
def load_values(base, slot, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns [slots, BLOCK_D]; zeros for slots below 0. Bypasses the L1 cache, which may hold a slot's earlier content."""
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (slot >= 0)[:, None] & (column < D)
    return tl.load(base + slot.to(tl.int64)[:, None] * D + column, inside, 0.0, cache_modifier=".cg")


@triton.jit
def load_keys(base, slot, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `load_values`, in two halves [slots, BLOCK_D / 2]. Keys have twice the bytes of values, and Triton gives tensors of
    one shape one layout: in that of values, threads would read every second 16 bytes of keys, and all of them twice."""
    HALF: tl.constexpr = BLOCK_D // 2
    column = tl.arange(0, HALF)[None, :]
    inside = (slot >= 0)[:, None]
    address = base + slot.to(tl.int64)[:, None] * D + column
    low = tl.load(address, inside & (column < D), 0.0, cache_modifier=".cg")
    high = tl.load(address + HALF, inside & (HALF + column < D), 0.0, cache_modifier=".cg")
    return low, high


@triton.jit
def scores(query, slot, key):
    """Returns the scores [slots] of one query, in halves as keys are; -inf for slots below 0."""
    products = key[0] * query[0][None, :] + key[1] * query[1][None, :]
    return tl.where(slot >= 0, tl.sum(products, 1), float("-inf"))


@triton.jit
def load_chunks(cache, visible, capacity, split, HEAD: tl.constexpr, SPLIT: tl.constexpr):
    """Loads the `Chunks` of program `split`. cache: `HeadCache`; visible: slots [capacity]."""
    slots, keys, values = (), (), ()
    for chunk in tl.static_range(SPLIT.chunks):  # Before any key, as the load of a key waits for its slot.
        index = (split * SPLIT.chunks + chunk) * SPLIT.chunk + tl.arange(0, SPLIT.chunk)
        slots = slots + (tl.load(visible + index, index < capacity, -1),)
    for chunk in tl.static_range(SPLIT.chunks):
        keys = keys + (load_keys(cache.k, slots[chunk], HEAD.d_qk, HEAD.block_qk),)
        values = values + (load_values(cache.v, slots[chunk], HEAD.d_v, HEAD.block_v),)
        if SPLIT.pause > 0 and chunk + 1 < SPLIT.chunks:
            pause(SPLIT.pause)
    return Chunks(slots, keys, values)


@triton.jit
def attend_tiles(
    query, cache, visible, count, begin, stride, TILE: tl.constexpr, STAGES: tl.constexpr, HEAD: tl.constexpr
):  # fmt: skip
    """Attends to the slots in visible[begin:count], TILE at a time, `stride` apart: the `SoftmaxState`.

    Each row of a tile has a softmax of its own until the end, so that rows are reduced once, not in every tile. STAGES tiles
    are loaded at once.
    """
    row = tl.arange(0, TILE)
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    accumulator = tl.zeros([TILE, HEAD.block_v], tl.float32)
    for start in tl.range(begin, count, stride, num_stages=STAGES):
        slot = tl.load(visible + start + row, start + row < count, -1)
        key = load_keys(cache.k, slot, HEAD.d_qk, HEAD.block_qk)
        value = load_values(cache.v, slot, HEAD.d_v, HEAD.block_v).to(tl.float32)
        score = scores(query, slot, key)
        larger = tl.maximum(maximum, score)
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        rescale = tl.exp2(maximum - finite)
        weight = tl.exp2(score - finite)
        total = total * rescale + weight
        accumulator = accumulator * rescale[:, None] + weight[:, None] * value
        maximum = larger
    largest = tl.max(maximum, 0)
    rescale = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    return SoftmaxState(largest, tl.sum(total * rescale, 0), tl.sum(accumulator * rescale[:, None], 0))


@triton.jit
def attend_chunks(query, chunks, cache, visible, count, split, HEAD: tl.constexpr, SPLIT: tl.constexpr):
    """Attends to the keys of program `split`: its `SoftmaxState`, with an accumulator [block_v].

    query: halves [block_qk / 2], float32, scaled. chunks: from `load_chunks`. With `has_remaining`, the programs also share
    the slots in visible[:count] beyond all chunks.
    """
    chunk_scores = ()
    largest = tl.full([SPLIT.chunk], float("-inf"), tl.float32)
    for chunk in tl.static_range(SPLIT.chunks):
        chunk_scores = chunk_scores + (scores(query, chunks.slots[chunk], chunks.k[chunk]),)
        largest = tl.maximum(largest, chunk_scores[chunk])
    maximum = tl.max(largest, 0)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([SPLIT.chunk], tl.float32)
    accumulator = tl.zeros([SPLIT.chunk, HEAD.block_v], tl.float32)
    for chunk in tl.static_range(SPLIT.chunks):
        weight = tl.exp2(chunk_scores[chunk] - finite)
        total += weight
        accumulator += weight[:, None] * chunks.v[chunk].to(tl.float32)
    state = SoftmaxState(maximum, tl.sum(total, 0), tl.sum(accumulator, 0))
    if SPLIT.has_remaining:
        FIRST: tl.constexpr = SPLIT.splits * SPLIT.chunks * SPLIT.chunk
        if count > FIRST:
            begin = FIRST + split * SPLIT.tile
            rest = attend_tiles(query, cache, visible, count, begin, SPLIT.splits * SPLIT.tile, SPLIT.tile, 1, HEAD)
            state = merge(state, rest)
    return state


@triton.jit
def merge(a, b):
    """Returns the `SoftmaxState` of the keys of both."""
    maximum = tl.maximum(a.maximum, b.maximum)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    of_a, of_b = tl.exp2(a.maximum - finite), tl.exp2(b.maximum - finite)
    return SoftmaxState(maximum, a.total * of_a + b.total * of_b, a.accumulator * of_a + b.accumulator * of_b)
