"""Many bytes in one kernel: all programs stay on the GPU and go through the network together, byte after byte.

What bounds a stream is not arithmetic but latency: of launches, of memory, of one program waiting for another. Here nothing
is launched between bytes. Programs synchronize on counters after each phase of a block, and before they wait they load what
does not depend on the others: weights, and results of earlier phases. In phases 1 to 3 the work of a head is shared by a
group of workers and, if there are any, by as many attention programs, which synchronize among themselves:

    1 query, key and value of the new byte         workers              the head's rows of W_qkv
    2 attention to a part of the head's keys       attention programs   parts of the keys
    3 the parts merged, and projected              workers              rows of W_p, the head's columns   all workers wait
    4 the feed-forward network's inner layer       workers              rows of W_1                       all workers wait
    5 its outer layer                              workers              rows of W_2                       all workers wait

Then come the logits, from which each worker chooses the next byte for itself (all choose the same) and embeds it. Attention
programs do nothing else, so they load keys and values of the next block while workers are in phases 3 to 5. Where there are
few keys, there are no attention programs: workers do phase 2, which is as fast and needs no synchronization.

Shapes in comments: width W, inner width F, batch B (streams), heads H. Activations are float32, weights have the model's
precision.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longstride.sampling.kernels.arguments import BlockCache, BlockWeights, Linear, Norm
from longstride.sampling.kernels.cached_attention import HeadCache, attend_chunks, load_chunks
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embedded, normalized, wide
from longstride.sampling.kernels.meeting import arrive, fresh, wait

COUNTER_STRIDE = tl.constexpr(32)
"""int32 numbers from one counter to the next, so that no two share a cache line."""


class Worker(NamedTuple):
    """Which share of the work a program has."""

    program: Any
    """Index among all workers, or all attention programs."""
    group: Any
    member: Any
    """Index in the group."""


@triton.jit
def interleaved_rows(index, PROGRAMS: tl.constexpr, ROWS: tl.constexpr):
    """Returns the rows of program `index`: every PROGRAMS-th, so that each has some even if there are few."""
    return index + tl.arange(0, ROWS) * PROGRAMS


@triton.jit
def load_rows(linear, row, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Loads rows of a weight [OUT, IN] and of its bias: [rows, BLOCK_IN] and [rows]; zeros past their end."""
    column = tl.arange(0, BLOCK_IN)
    inside = (row < OUT)[:, None] & (column < IN)[None, :]
    weight = tl.load(linear.weight + row[:, None] * IN + column[None, :], inside, 0.0)
    return Linear(weight, tl.load(linear.bias + row, row < OUT, 0.0))


@triton.jit
def load_norm(norm, NETWORK: tl.constexpr):
    column = tl.arange(0, NETWORK.block_width)
    inside = column < NETWORK.width
    return Norm(tl.load(norm.scale + column, inside, 0.0), tl.load(norm.shift + column, inside, 0.0))


@triton.jit
def product(weight, x):
    """Returns weight [rows, BLOCK_IN] times x [BLOCK_IN]."""
    return tl.sum(weight.to(tl.float32) * x[None, :], 1)


@triton.jit
def normalized_row(x, row, norm, NETWORK: tl.constexpr):
    """Returns the layer norm of x, [block_width]. row: pointer to h; its first element is near enough to the mean of x."""
    near = tl.load(row, cache_modifier=".cg")
    return normalized(x, near, tl.arange(0, NETWORK.block_width) < NETWORK.width, norm, NETWORK.width)


@triton.jit
def sum_heads(projected, column, inside, NETWORK: tl.constexpr):
    """Returns columns of what attention adds to h, without its bias. projected: of one stream [H, W]."""
    total = fresh(projected + column, inside)
    for head in tl.static_range(1, NETWORK.heads):
        total += fresh(projected + head * NETWORK.width + column, inside)
    return total


@triton.jit
def after_attention(h, projected, column, inside, NETWORK: tl.constexpr):
    return fresh(h + column, inside) + sum_heads(projected, column, inside, NETWORK)


@triton.jit
def norm_of_block(norms, layer, W: tl.constexpr):
    return Norm(norms.scale + layer * W, norms.shift + layer * W)


@triton.jit
def linear_of_block(linears, layer, OUT: tl.constexpr, IN: tl.constexpr):
    return Linear(linears.weight + wide(layer) * OUT * IN, linears.bias + layer * OUT)


@triton.jit
def weights_of_block(blocks, layer, NETWORK: tl.constexpr):
    """Returns the weights of one block. blocks: `BlockWeights`, stacked. Each phase calls it for itself: pointers that live
    through all phases would take registers."""
    W: tl.constexpr = NETWORK.width
    F: tl.constexpr = NETWORK.ff_width
    return BlockWeights(
        norm_of_block(blocks.norm_attention, layer, W),
        linear_of_block(blocks.query_key_value, layer, NETWORK.qkv_width, W),
        linear_of_block(blocks.project, layer, W, W),
        norm_of_block(blocks.norm_ff, layer, W),
        linear_of_block(blocks.inner, layer, F, W),
        linear_of_block(blocks.outer, layer, W, F),
    )


@triton.jit
def cache_of_block(cache, layer, HEAD: tl.constexpr):
    start, slots = tl.load(cache.starts + layer), tl.load(cache.slots + layer)
    return BlockCache(cache.k + start * HEAD.d_qk, cache.v + start * HEAD.d_v, slots)


@triton.jit
def counter_of_head(counters, head):
    return counters + (1 + head) * COUNTER_STRIDE


@triton.jit
def query_key_value(
    worker, target, h, blocks, layer, cache, own_slots, space, NETWORK: tl.constexpr, HEAD: tl.constexpr,
    PARTITION: tl.constexpr,
):  # fmt: skip
    """Phase 1. Keys and values also go to the cache. own_slots: of each head, for this position."""
    block = weights_of_block(blocks, layer, NETWORK)
    D_QK: tl.constexpr = HEAD.d_qk
    D_V: tl.constexpr = HEAD.d_v
    W: tl.constexpr = NETWORK.width
    H: tl.constexpr = NETWORK.heads
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = NETWORK.qkv_width
    column = tl.arange(0, NETWORK.block_width)
    index = interleaved_rows(worker.member, PARTITION.group, PARTITION.qkv_rows)  # In the head's queries, keys and values.
    is_key = (index >= D_QK) & (index < 2 * D_QK)
    is_value = (index >= 2 * D_QK) & (index < 2 * D_QK + D_V)
    norm = load_norm(block.norm_attention, NETWORK)
    for turn in tl.static_range(PARTITION.head_turns):
        head = worker.group + turn * PARTITION.groups
        row = tl.where(is_key, QK + head * D_QK + index - D_QK, 2 * QK + head * D_V + index - 2 * D_QK)
        row = tl.where(index < D_QK, head * D_QK + index, row)
        inside = (index < 2 * D_QK + D_V) & (head < H)
        row = tl.where(inside, row, OUT)
        rows = load_rows(block.query_key_value, row, OUT, W, NETWORK.block_width)
        own_slot = tl.load(own_slots + tl.minimum(head, H - 1))
        wait(space.counters, target)
        for stream in tl.static_range(PARTITION.batch):
            x = fresh(h + stream * W + column, column < W)
            y = product(rows.weight, normalized_row(x, h + stream * W, norm, NETWORK)) + rows.bias
            tl.store(space.qkv + stream * OUT + row, tl.where(index < D_QK, y * HEAD.scale, y), inside)
            slot = wide(stream * H + head) * cache.slots + own_slot
            tl.store(cache.k + slot * D_QK + index - D_QK, y, is_key & inside & (own_slot >= 0))
            rounded = y.to(cache.v.dtype.element_ty)
            tl.store(cache.v + slot * D_V + index - 2 * D_QK, rounded, is_value & inside & (own_slot >= 0))
        if head < H:
            arrive(counter_of_head(space.counters, head))


@triton.jit
def attend_to_parts(
    worker, target, cache, visible, list_row, space, NETWORK: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr,
    PARTITION: tl.constexpr,
):  # fmt: skip
    """Phase 2. The newest key is left to phase 3, so that keys are loaded before there is a query. list_row: of `visible`,
    that of the block's first head."""
    H: tl.constexpr = NETWORK.heads
    HALF: tl.constexpr = HEAD.block_qk // 2
    qk_column, v_column = tl.arange(0, HALF), tl.arange(0, HEAD.block_v)
    slots, counts = visible.slots + wide(list_row) * visible.capacity, visible.counts + list_row
    for head_turn in tl.static_range(PARTITION.head_turns):
        for part_turn in tl.static_range(PARTITION.part_turns):
            head, item = worker.group + head_turn * PARTITION.groups, worker.member + part_turn * PARTITION.group
            stream, split = item // SPLIT.splits, item % SPLIT.splits
            if (head < H) & (stream < PARTITION.batch):
                head_slots = slots + wide(head) * visible.capacity
                first_slot = wide(stream * H + head) * cache.slots
                head_cache = HeadCache(cache.k + first_slot * HEAD.d_qk, cache.v + first_slot * HEAD.d_v)
                chunks = load_chunks(head_cache, head_slots, visible.capacity, split, HEAD, SPLIT)
                count = 0
                if SPLIT.has_remaining:
                    count = tl.load(counts + head)
                wait(counter_of_head(space.counters, head), target)
                address = space.qkv + stream * NETWORK.qkv_width + head * HEAD.d_qk + qk_column
                query = (fresh(address, qk_column < HEAD.d_qk), fresh(address + HALF, HALF + qk_column < HEAD.d_qk))
                state = attend_chunks(query, chunks, head_cache, head_slots, count, split, HEAD, SPLIT)
                part = (stream * H + head) * SPLIT.splits + split
                tl.store(space.parts.maximum + part, state.maximum)
                tl.store(space.parts.total + part, state.total)
                tl.store(space.parts.accumulator + part * HEAD.d_v + v_column, state.accumulator, v_column < HEAD.d_v)
                arrive(counter_of_head(space.counters, head))


@triton.jit
def merge_and_project(
    worker, target, blocks, layer, own_slots, space, VALUE: tl.constexpr, NETWORK: tl.constexpr, HEAD: tl.constexpr,
    SPLIT: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """Phase 3. The newest key is one more part, computed before the others arrive; its value is rounded to the dtype VALUE,
    as in the cache."""
    block = weights_of_block(blocks, layer, NETWORK)
    D_QK: tl.constexpr = HEAD.d_qk
    D_V: tl.constexpr = HEAD.d_v
    W: tl.constexpr = NETWORK.width
    H: tl.constexpr = NETWORK.heads
    QK: tl.constexpr = H * D_QK
    qk_column, v_column = tl.arange(0, HEAD.block_qk), tl.arange(0, HEAD.block_v)
    split = tl.arange(0, SPLIT.splits)
    for head_turn in tl.static_range(PARTITION.head_turns):
        for part_turn in tl.static_range(PARTITION.part_turns):
            head, item = worker.group + head_turn * PARTITION.groups, worker.member + part_turn * PARTITION.group
            stream, share = item // SPLIT.splits, item % SPLIT.splits
            if (head < H) & (stream < PARTITION.batch):
                row = interleaved_rows(share, SPLIT.splits, PARTITION.project_rows)
                inside = (row < W)[:, None] & (v_column < D_V)[None, :]
                weight = tl.load(block.project.weight + row[:, None] * W + head * D_V + v_column[None, :], inside, 0.0)
                own_slot = tl.load(own_slots + head)
                counter = counter_of_head(space.counters, head)
                if SPLIT.has_attention_programs:  # Without them, this worker has waited for phase 1 in phase 2.
                    wait(counter, target - PARTITION.batch * SPLIT.splits)
                qkv = space.qkv + stream * NETWORK.qkv_width
                query = qkv + head * D_QK + qk_column
                score = tl.sum(fresh(query, qk_column < D_QK) * fresh(query + QK, qk_column < D_QK), 0)
                value = fresh(qkv + 2 * QK + head * D_V + v_column, v_column < D_V)
                value = tl.where(own_slot >= 0, value, 0.0).to(VALUE).to(tl.float32)
                part = (stream * H + head) * SPLIT.splits + split
                wait(counter, target)
                maximum, total = fresh(space.parts.maximum + part, split >= 0), fresh(space.parts.total + part, split >= 0)
                inside = (split >= 0)[:, None] & (v_column < D_V)[None, :]
                accumulator = fresh(space.parts.accumulator + part[:, None] * D_V + v_column[None, :], inside)
                score = tl.where(own_slot >= 0, score, float("-inf"))
                largest = tl.maximum(tl.max(maximum, 0), score)
                largest = tl.where(largest == float("-inf"), 0.0, largest)
                rescale, own_weight = tl.exp2(maximum - largest), tl.exp2(score - largest)
                denominator = tl.sum(total * rescale, 0) + own_weight
                numerator = tl.sum(accumulator * rescale[:, None], 0) + own_weight * value
                attended = numerator / tl.where(denominator > 0, denominator, 1.0)
                tl.store(space.projected + (stream * H + head) * W + row, product(weight, attended), row < W)
    arrive(space.counters)


@triton.jit
def inner_layer(worker, target, h, blocks, layer, space, NETWORK: tl.constexpr, PARTITION: tl.constexpr):
    """Phase 4."""
    block = weights_of_block(blocks, layer, NETWORK)
    W: tl.constexpr = NETWORK.width
    F: tl.constexpr = NETWORK.ff_width
    B: tl.constexpr = PARTITION.batch
    row = interleaved_rows(worker.program, PARTITION.workers, PARTITION.inner_rows)
    column = tl.arange(0, NETWORK.block_width)
    rows = load_rows(block.inner, row, F, W, NETWORK.block_width)
    norm = load_norm(block.norm_ff, NETWORK)
    project_bias = tl.load(block.project.bias + column, column < W, 0.0)
    residual = fresh(h + column, column < W) if B == 1 else 0.0  # For more streams there are too few registers.
    wait(space.counters, target)
    for stream in tl.static_range(B):
        if B > 1:
            residual = fresh(h + stream * W + column, column < W)
        projected = space.projected + stream * NETWORK.heads * W
        x = residual + project_bias + sum_heads(projected, column, column < W, NETWORK)
        y = product(rows.weight, normalized_row(x, h + stream * W, norm, NETWORK)) + rows.bias
        tl.store(space.inner + stream * F + row, y * tl.sigmoid(y * SLOPE), row < F)
    arrive(space.counters)


@triton.jit
def outer_layer(worker, target, h, blocks, layer, space, NETWORK: tl.constexpr, PARTITION: tl.constexpr):
    """Phase 5: writes the block's output to space.h, which may be h: a program now reads only its own rows of it."""
    block = weights_of_block(blocks, layer, NETWORK)
    W: tl.constexpr = NETWORK.width
    F: tl.constexpr = NETWORK.ff_width
    B: tl.constexpr = PARTITION.batch
    row = interleaved_rows(worker.program, PARTITION.workers, PARTITION.outer_rows)
    column = tl.arange(0, NETWORK.block_ff)
    rows = load_rows(block.outer, row, W, F, NETWORK.block_ff)
    bias = rows.bias + tl.load(block.project.bias + row, row < W, 0.0)
    residual = after_attention(h, space.projected, row, row < W, NETWORK) if B == 1 else 0.0
    wait(space.counters, target)
    for stream in tl.static_range(B):
        if B > 1:
            projected = space.projected + stream * NETWORK.heads * W
            residual = after_attention(h + stream * W, projected, row, row < W, NETWORK)
        y = product(rows.weight, fresh(space.inner + stream * F + column, column < F))
        tl.store(space.h + stream * W + row, residual + bias + y, row < W)
    arrive(space.counters)


@triton.jit
def write_logits(worker, target, weights, space, NETWORK: tl.constexpr, PARTITION: tl.constexpr):
    W: tl.constexpr = NETWORK.width
    row = interleaved_rows(worker.program, PARTITION.workers, PARTITION.logit_rows)
    column = tl.arange(0, NETWORK.block_width)
    inside = (row < BYTES)[:, None] & (column < W)[None, :]
    weight = tl.load(weights.output + row[:, None] * W + column[None, :], inside, 0.0)
    norm = load_norm(weights.norm, NETWORK)
    wait(space.counters, target)
    for stream in tl.static_range(PARTITION.batch):
        x = fresh(space.h + stream * W + column, column < W)
        y = product(weight, normalized_row(x, space.h + stream * W, norm, NETWORK))
        tl.store(space.logits + stream * BYTES + row, y, row < BYTES)
    arrive(space.counters)


@triton.jit(do_not_specialize=["steps", "length", "top_k"])
def make_bytes(
    weights, cache, visible, streams, space, steps, length, temperature, top_k, top_p, NETWORK: tl.constexpr,
    HEAD: tl.constexpr, SPLIT: tl.constexpr, PARTITION: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Extends each stream by `steps` bytes, from position visible.position on; bytes of its prompt are kept.

    weights: `Weights`; cache: `Cache`; visible: `VisibleSlots` of these positions; streams: `Streams` of this length; space:
    `Workspace`. Constants: `NetworkSizes`, `HeadSizes`, `KeySplit`, `Partition`. The grid has PARTITION.workers programs,
    twice that with attention programs.
    """
    B: tl.constexpr = PARTITION.batch
    W: tl.constexpr = NETWORK.width
    first = tl.load(visible.position)
    program = tl.program_id(0) % PARTITION.workers
    worker = Worker(program, program // PARTITION.group, program % PARTITION.group)
    if tl.program_id(0) < PARTITION.workers:
        embedding = space.embedding + program * B * W
        column = tl.arange(0, NETWORK.block_width)
        target = 0  # Arrivals at the counter of all workers.
        head_target = 0  # Arrivals at the counter of each head.
        for step in range(steps):
            position = first + step
            for stream in tl.static_range(B):
                byte = tl.load(streams.last_bytes + program * B + stream)
                x = embedded(column, column < W, position, byte, weights.embedding, NETWORK)
                tl.store(embedding + stream * W + column, x, column < W)
            tl.debug_barrier()
            for layer in range(NETWORK.layers):
                list_row = (step * NETWORK.cycle + layer % NETWORK.cycle) * NETWORK.heads
                own_slots = visible.own + list_row
                block_cache = cache_of_block(cache, layer, HEAD)
                h = embedding if layer == 0 else space.h
                query_key_value(
                    worker, target, h, weights.blocks, layer, block_cache, own_slots, space, NETWORK, HEAD, PARTITION
                )  # fmt: skip
                head_target += PARTITION.group
                if not SPLIT.has_attention_programs:
                    attend_to_parts(
                        worker, head_target, block_cache, visible, list_row, space, NETWORK, HEAD, SPLIT, PARTITION
                    )  # fmt: skip
                head_target += B * SPLIT.splits
                VALUE: tl.constexpr = cache.v.dtype.element_ty
                merge_and_project(
                    worker, head_target, weights.blocks, layer, own_slots, space, VALUE, NETWORK, HEAD, SPLIT, PARTITION
                )  # fmt: skip
                inner_layer(worker, target + PARTITION.workers, h, weights.blocks, layer, space, NETWORK, PARTITION)
                outer_layer(worker, target + 2 * PARTITION.workers, h, weights.blocks, layer, space, NETWORK, PARTITION)
                target += 3 * PARTITION.workers
            write_logits(worker, target, weights, space, NETWORK, PARTITION)
            target += PARTITION.workers
            wait(space.counters, target)
            for stream in tl.static_range(B):
                logit = tl.load(space.logits + stream * BYTES + tl.arange(0, BYTES), cache_modifier=".cg")
                byte = choose(
                    logit, tl.load(streams.random_states + stream), position, temperature, top_k, top_p, FILTERED
                )  # fmt: skip
                given = tl.load(streams.tokens + stream * length + position).to(tl.int32)
                byte = tl.where(position < tl.load(streams.prompt_lengths + stream), given, byte)
                tl.store(streams.last_bytes + program * B + stream, byte)
                if program == 0:
                    tl.store(streams.tokens + stream * length + position, byte.to(tl.uint8))
            tl.debug_barrier()
    else:
        if SPLIT.has_attention_programs:
            head_target = PARTITION.group
            for step in range(steps):
                for layer in range(NETWORK.layers):
                    list_row = (step * NETWORK.cycle + layer % NETWORK.cycle) * NETWORK.heads
                    block_cache = cache_of_block(cache, layer, HEAD)
                    attend_to_parts(
                        worker, head_target, block_cache, visible, list_row, space, NETWORK, HEAD, SPLIT, PARTITION
                    )  # fmt: skip
                    head_target += PARTITION.group + B * SPLIT.splits
