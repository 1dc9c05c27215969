"""chunk_forward: attention inside lanes that are too long for shared memory, for Block and Column.

A program is one warpgroup, and several share a multiprocessor. Its items are tiles of 64 queries of a lane. Their keys and
values come 64 at a time through a ring in shared memory, which TMA fills across the ends of items. The product of queries
and the next keys runs beside that of weights and values. A further product, with ones, sums the weights, which takes fewer
instructions and registers than to add them. Scores are in bits: `scale` includes log2(e).
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longstride.attention.kernels.hopper import lane_tiles
from longstride.attention.kernels.hopper.ring import item_of_round, make_barriers, make_tiles, rounds
from longstride.attention.kernels.hopper.tiles import ROWS, mma_layout, operand_layout
from longstride.attention.kernels.primitives import LOWEST

ONES = gl.constexpr(8)
"""Columns of ones: the fewest of a product."""


class ChunkStep(NamedTuple):
    """A step of a program: an item, and 64 of its keys."""

    turn: Any  # The item is the program's turn-th.
    step: Any
    batch: Any
    head: Any
    lane: Any
    tile: Any  # of queries, which see tiles of keys up to this one


@gluon.jit
def begin_item(turn, work, HEADS_FIRST: gl.constexpr):
    """An item's first step. The tiles of a lane are neighbours, those with most keys first."""
    item = item_of_round(turn)
    tiles = (work.length + ROWS - 1) // ROWS
    batch, head, lane = lane_tiles.locate_lane(item // tiles, work, HEADS_FIRST)
    return ChunkStep(turn, 0, batch, head, lane, tiles - 1 - item % tiles)


@gluon.jit
def following_step(now, work, HEADS_FIRST: gl.constexpr):
    """The step after this one."""
    turn, step, batch, head, lane, tile = now
    step += 1
    if step > tile:
        turn, step, batch, head, lane, tile = begin_item(turn + 1, work, HEADS_FIRST)
    return ChunkStep(turn, step, batch, head, lane, tile)


@gluon.jit
def fetch_keys(k, v, keys, values, full, count, step, work, HEADS_FIRST: gl.constexpr):
    """Starts to copy the keys and values of a step in, the program's count-th, if there is such a step. Returns the next."""
    present = step.turn < rounds(work.items)
    slot = count % keys.shape[0]
    mbarrier.expect(full.index(slot), 2 * ROWS * keys.shape[2] * 2, pred=present)
    place = step.batch, step.head, step.lane, step.step * ROWS
    lane_tiles.copy_all((k, v), place, full.index(slot), ((keys.index(slot),), (values.index(slot),)), present)
    return following_step(step, work, HEADS_FIRST)


@gluon.jit
def fetch_queries(q, queries, full, turn, work, HEADS_FIRST: gl.constexpr):
    """The same for the queries of an item."""
    step = begin_item(turn, work, HEADS_FIRST)
    present = turn < rounds(work.items)
    mbarrier.expect(full.index(turn % 2), ROWS * queries.shape[2] * 2, pred=present)
    tile = (queries.index(turn % 2),)
    lane_tiles.copy_in(q, (step.batch, step.head, step.lane, step.tile * ROWS), full.index(turn % 2), tile, present)


@gluon.jit
def score_step(query, keys, full, count):
    """Starts the product of queries with the keys of a step, once these are there."""
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS))
    return warpgroup_mma(query, keys.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values_and_ones(scores, running_max, weight, sums, value, ones, scale):
    """Takes the softmax of scores, and starts the products of the weights with the values and with ones."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_max[:, None]).to(value.dtype)
    shrink = gl.exp2(running_max - new_max)
    sums *= gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
    weight *= gl.convert_layout(shrink, gl.SliceLayout(1, weight.type.layout))[:, None]
    operand = gl.convert_layout(weights, operand_layout(sums.type.layout))
    sums = warpgroup_mma(operand, value, sums, is_async=True)
    operand = gl.convert_layout(weights, operand_layout(weight.type.layout))
    weight = warpgroup_mma(operand, ones, weight, is_async=True)
    return new_max, weight, sums


@gluon.jit
def chunk_forward(q, k, v, output, lse, work, scale, STAGES: gl.constexpr, HEADS_FIRST: gl.constexpr):
    """q, k, v, output: tensor descriptors."""
    dtype: gl.constexpr = q.dtype
    D: gl.constexpr = q.block_type.shape[4]
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout(ROWS))
    queries = make_tiles(dtype, 2, ROWS, D)
    keys = make_tiles(dtype, STAGES, ROWS, D)
    values = make_tiles(dtype, STAGES, ROWS, D)
    staged = make_tiles(dtype, 1, ROWS, D).index(0)
    ones = make_tiles(dtype, 1, ONES, ROWS).index(0)
    ones.store(gl.full([ONES, ROWS], 1.0, dtype, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])))
    full = make_barriers(STAGES)
    queries_full = make_barriers(2)
    fence_async_shared()
    fetch_queries(q, queries, queries_full, 0, work, HEADS_FIRST)
    ahead = begin_item(0, work, HEADS_FIRST)
    for slot in gl.static_range(STAGES):
        ahead = fetch_keys(k, v, keys, values, full, slot, ahead, work, HEADS_FIRST)

    count = 0
    for turn in range(rounds(work.items)):
        _, _, batch, head, lane, tile = begin_item(turn, work, HEADS_FIRST)
        fetch_queries(q, queries, queries_full, turn + 1, work, HEADS_FIRST)
        running_max = gl.full([ROWS], LOWEST, gl.float32, rows)
        weight = gl.zeros([ROWS, ONES], gl.float32, mma_layout(ONES))
        sums = gl.zeros([ROWS, D], gl.float32, mma_layout(D))
        query = queries.index(turn % 2)
        mbarrier.wait(queries_full.index(turn % 2), (turn // 2) & 1)
        scores = warpgroup_mma_wait(0, deps=(score_step(query, keys, full, count),))
        for _ in range(tile):
            running_max, weight, sums = add_values_and_ones(
                scores, running_max, weight, sums, values.index(count % STAGES), ones.permute((1, 0)), scale
            )  # fmt: skip
            scores = score_step(query, keys, full, count + 1)
            weight, sums, scores = warpgroup_mma_wait(0, deps=(weight, sums, scores))
            ahead = fetch_keys(k, v, keys, values, full, count + STAGES, ahead, work, HEADS_FIRST)
            count += 1
        scores = lane_tiles.mask_distances(scores, 0, 0, 0, ROWS)
        running_max, weight, sums = add_values_and_ones(
            scores, running_max, weight, sums, values.index(count % STAGES), ones.permute((1, 0)), scale
        )  # fmt: skip
        weight, sums = warpgroup_mma_wait(0, deps=(weight, sums))
        ahead = fetch_keys(k, v, keys, values, full, count + STAGES, ahead, work, HEADS_FIRST)
        count += 1

        total = gl.max(weight, 1)  # All columns are the same.
        inverse = gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, mma_layout(D)))
        tma.store_wait(0)
        staged.store((sums * inverse[:, None]).to(dtype))
        fence_async_shared()
        lane_tiles.copy_out(output, (batch, head, lane, tile * ROWS), (staged,))
        index = tile * ROWS + gl.arange(0, ROWS, rows)
        lse_lane = lse + (batch * work.heads + head).to(gl.int64) * work.n + work.first + lane * work.lane_stride
        result = running_max + gl.log2(gl.convert_layout(total, rows))
        gl.store(lse_lane + index * work.index_stride, result, mask=index < work.length)
    tma.store_wait(0)
