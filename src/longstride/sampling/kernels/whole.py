"""Many bytes in one kernel: all programs stay on the GPU and go through the network together, byte after byte.

What one stream waits for is not arithmetic but latency: of launches, of memory, of one program for another. Here nothing is
launched between bytes; programs meet at a counter after each of a block's five phases, and load the next phase's weights
while they wait for each other:

    1 query, key and value of the new byte       rows of W_qkv are spread over the programs
    2 attention                                  heads, and parts of their keys
    3 the parts put together, and W_p            rows of W_p
    4 the feed-forward network's inner layer     rows of W_1
    5 its outer layer                            rows of W_2

then the logits, from which each program chooses the next byte for itself, as all choose the same. With one program there is
nobody to wait for: so it runs in Triton's interpreter.

Shapes: width W, inner F, streams B, heads H. Activations are float32 throughout, weights as the model's precision has them.
"""

import triton
import triton.language as tl

from longstride.attention.kernels.cached import attend_part, first_tile
from longstride.attention.kernels.meeting import arrive, fresh, wait, wide
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embed, normalized


@triton.jit
def normalized_row(x, weight, bias, W: tl.constexpr, BLOCK_W: tl.constexpr):
    across = tl.arange(0, BLOCK_W)
    near = tl.load(x, cache_modifier=".cg")  # Any of them will do.
    return normalized(fresh(x + across, across < W), near, weight, bias, W, BLOCK_W)


@triton.jit
def rows_of(weight, program, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr):
    """A program's [ROWS, BLOCK_IN] of a matrix [OUT, IN]; zeros past its end."""
    row = program * ROWS + tl.arange(0, ROWS)
    across = tl.arange(0, BLOCK_IN)
    return tl.load(weight + row[:, None] * IN + across[None, :], (row < OUT)[:, None] & (across < IN)[None, :], 0.0)


@triton.jit
def query_key_value(
    program, counter, target, h, norm, shift, weight, bias, q, keys, values, slots, pattern_of, own, scale,
    B: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Phase 1. Keys and values go to their slots."""
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = 2 * QK + W
    part = rows_of(weight, program, OUT, W, ROWS, BLOCK_W)
    row = program * ROWS + tl.arange(0, ROWS)
    is_key = (row >= QK) & (row < 2 * QK)
    is_value = (row >= 2 * QK) & (row < OUT)
    head = tl.where(is_key, (row - QK) // D_QK, tl.where(is_value, (row - 2 * QK) // D_V, 0))
    slot = tl.load(own + tl.load(pattern_of + head))
    added = tl.load(bias + row, row < OUT, 0.0)
    wait(counter, target)
    for stream in tl.static_range(B):
        x = normalized_row(h + stream * W, norm, shift, W, BLOCK_W)
        y = tl.sum(part.to(tl.float32) * x[None, :], 1) + added
        tl.store(q + stream * QK + row, y * scale, row < QK)
        place = (stream * H + head).to(tl.int64) * slots + slot
        tl.store(keys + place * D_QK + (row - QK) % D_QK, y, is_key & (slot >= 0))
        value = y.to(values.dtype.element_ty)
        tl.store(values + place * D_V + (row - 2 * QK) % D_V, value, is_value & (slot >= 0))
    arrive(counter)


@triton.jit
def look(
    program, counter, target, q, keys, values, slots, pattern_of, seen, counts, own, most, part_top, part_total, part_result,
    B: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr, TURNS: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, WIDE_TILE: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Phase 2: what each part of a head's keys gives. All but the newest were there before: some are loaded while phase 1
    goes on."""
    across, along = tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_V)
    for turn in tl.static_range(TURNS):
        item = program + turn * PROGRAMS
        split = item % SPLITS
        head = tl.minimum(item // SPLITS, B * H - 1)  # Of all streams' heads.
        pattern = tl.load(pattern_of + head % H)
        newest = tl.where(split == 0, tl.load(own + pattern), -1)
        key_base = keys + wide(head) * slots * D_QK
        value_base = values + wide(head) * slots * D_V
        listed, count = seen + wide(pattern) * most, tl.load(counts + pattern)
        slot, key, value = first_tile(listed, count, key_base, value_base, split, TILE, D_QK, D_V, BLOCK_QK, BLOCK_V)
        if turn == 0:
            wait(counter, target)
        query = fresh(q + head * D_QK + across, across < D_QK)
        key_here = fresh(key_base + wide(newest) * D_QK + across, (across < D_QK) & (newest >= 0))
        value_here = fresh(value_base + wide(newest) * D_V + along, (along < D_V) & (newest >= 0)).to(tl.float32)
        top, total, result = attend_part(
            query, key_here, value_here, newest, slot, key, value, listed, count, key_base, value_base, split, SPLITS, TILE,
            WIDE_TILE, D_QK, D_V, BLOCK_QK, BLOCK_V,
        )  # fmt: skip
        if item < B * H * SPLITS:
            tl.store(part_top + item, top)
            tl.store(part_total + item, total)
            tl.store(part_result + item * D_V + along, result, along < D_V)
    arrive(counter)


@triton.jit
def join(
    program, counter, target, pattern_of, counts, part_top, part_total, part_result, weight, bias, h, middle,
    B: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Phase 3: the parts put together, projected, and added to h."""
    head, split, along = tl.arange(0, BLOCK_H), tl.arange(0, SPLITS), tl.arange(0, BLOCK_V)
    row = program * ROWS + tl.arange(0, ROWS)
    there = (row < W)[:, None, None] & (head < H)[None, :, None] & (along < D_V)[None, None, :]
    cell = head[None, :, None] * D_V + along[None, None, :]
    part = tl.load(weight + row[:, None, None] * W + cell, there, 0.0)
    added = tl.load(bias + row, row < W, 0.0)
    count = tl.load(counts + tl.load(pattern_of + head, head < H, 0), head < H, 0)
    # Parts without keys need not be looked at; the first has the newest one, and if there are many keys, all have some.
    used = (head < H)[:, None] & ((split == 0)[None, :] | (split[None, :] * TILE < count[:, None]))
    wait(counter, target)
    for stream in tl.static_range(B):
        item = (stream * H + head)[:, None] * SPLITS + split[None, :]
        top = fresh(part_top + item, used, float("-inf"))
        total = fresh(part_total + item, used)
        result = fresh(
            part_result + item[:, :, None] * D_V + along[None, None, :], used[:, :, None] & (along < D_V)[None, None, :]
        )  # fmt: skip
        before = fresh(h + stream * W + row, row < W)
        highest = tl.max(top, 1)
        share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        whole = tl.sum(total * share, 1)
        found = tl.sum(result * share[:, :, None], 1) / tl.where(whole > 0, whole, 1.0)[:, None]
        y = tl.sum(tl.sum(part.to(tl.float32) * found[None], 2), 1) + added
        tl.store(middle + stream * W + row, before + y, row < W)
    arrive(counter)


@triton.jit
def inner_layer(
    program, counter, target, middle, norm, shift, weight, bias, inner, B: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Phase 4."""
    part = rows_of(weight, program, F, W, ROWS, BLOCK_W)
    row = program * ROWS + tl.arange(0, ROWS)
    added = tl.load(bias + row, row < F, 0.0)
    wait(counter, target)
    for stream in tl.static_range(B):
        x = normalized_row(middle + stream * W, norm, shift, W, BLOCK_W)
        y = tl.sum(part.to(tl.float32) * x[None, :], 1) + added
        tl.store(inner + stream * F + row, y * tl.sigmoid(y * SLOPE), row < F)
    arrive(counter)


@triton.jit
def outer_layer(
    program, counter, target, inner, weight, bias, middle, h, B: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Phase 5: the block's result."""
    across = tl.arange(0, BLOCK_F)
    part = rows_of(weight, program, W, F, ROWS, BLOCK_F)
    row = program * ROWS + tl.arange(0, ROWS)
    added = tl.load(bias + row, row < W, 0.0)
    wait(counter, target)
    for stream in tl.static_range(B):
        x = fresh(inner + stream * F + across, across < F)
        before = fresh(middle + stream * W + row, row < W)
        y = tl.sum(part.to(tl.float32) * x[None, :], 1) + added
        tl.store(h + stream * W + row, before + y, row < W)
    arrive(counter)


@triton.jit
def score(
    program, counter, target, h, norm, shift, weight, logits, B: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The logits."""
    part = rows_of(weight, program, BYTES, W, ROWS, BLOCK_W)
    row = program * ROWS + tl.arange(0, ROWS)
    wait(counter, target)
    for stream in tl.static_range(B):
        x = normalized_row(h + stream * W, norm, shift, W, BLOCK_W)
        tl.store(logits + stream * BYTES + row, tl.sum(part * x[None, :], 1), row < BYTES)
    arrive(counter)


@triton.jit
def make_bytes(
    tokens, known, state, position_first, steps, length, temperature, top_k, top_p,
    token_table, place_table, places,
    norm_1, shift_1, qkv_weight, qkv_bias, project_weight, project_bias,
    norm_2, shift_2, inner_weight, inner_bias, outer_weight, outer_bias,
    norm_last, shift_last, output_weight,
    key_cache, value_cache, key_starts, value_starts, slot_counts, pattern_of, seen, counts, own, most,
    h, q, part_top, part_total, part_result, middle, inner, logits, chosen, counter, scale,
    PROGRAMS: tl.constexpr, LAYERS: tl.constexpr, CYCLE: tl.constexpr, PATTERNS: tl.constexpr, B: tl.constexpr,
    W: tl.constexpr, F: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, DIMENSIONS: tl.constexpr,
    SPLITS: tl.constexpr, TURNS: tl.constexpr, TILE: tl.constexpr, WIDE_TILE: tl.constexpr, FILTERED: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    QKV_ROWS: tl.constexpr, PROJECT_ROWS: tl.constexpr, INNER_ROWS: tl.constexpr, OUTER_ROWS: tl.constexpr,
    LOGIT_ROWS: tl.constexpr,
):  # fmt: skip
    """`steps` bytes of B streams from position `position_first` on; those below `known` are given.

    seen, counts and own are what `list_seen` writes, of the patterns that `pattern_of` [CYCLE, H] numbers.
    """
    program = tl.program_id(0)
    OUT: tl.constexpr = 2 * H * D_QK + W
    first = tl.load(position_first)
    target = 0
    for step in range(steps):
        position = first + step
        for stream in tl.static_range(B):
            before = tl.load(chosen + program * B + stream)
            embed(stream, position, before, token_table, place_table, places, h, W, DIMENSIONS, BLOCK_W)
        tl.debug_barrier()
        here = step * PATTERNS
        for layer in range(LAYERS):
            keys, values = key_cache + tl.load(key_starts + layer), value_cache + tl.load(value_starts + layer)
            slots = tl.load(slot_counts + layer)
            numbers = pattern_of + layer % CYCLE * H
            query_key_value(
                program, counter, target, h, norm_1 + layer * W, shift_1 + layer * W, qkv_weight + wide(layer) * OUT * W,
                qkv_bias + layer * OUT, q, keys, values, slots, numbers, own + here, scale, B, W, H, D_QK, D_V, QKV_ROWS,
                BLOCK_W,
            )  # fmt: skip
            look(
                program, counter, target + PROGRAMS, q, keys, values, slots, numbers, seen + wide(here) * most,
                counts + here, own + here, most, part_top, part_total, part_result, B, H, D_QK, D_V, SPLITS, TURNS, PROGRAMS,
                TILE, WIDE_TILE, BLOCK_QK, BLOCK_V,
            )  # fmt: skip
            join(
                program, counter, target + 2 * PROGRAMS, numbers, counts + here, part_top, part_total, part_result,
                project_weight + wide(layer) * W * W, project_bias + layer * W, h, middle, B, W, H, D_V, SPLITS, TILE,
                PROJECT_ROWS, BLOCK_H, BLOCK_V,
            )  # fmt: skip
            inner_layer(
                program, counter, target + 3 * PROGRAMS, middle, norm_2 + layer * W, shift_2 + layer * W,
                inner_weight + wide(layer) * F * W, inner_bias + layer * F, inner, B, W, F, INNER_ROWS, BLOCK_W,
            )  # fmt: skip
            outer_layer(
                program, counter, target + 4 * PROGRAMS, inner, outer_weight + wide(layer) * W * F, outer_bias + layer * W,
                middle, h, B, W, F, OUTER_ROWS, BLOCK_F,
            )  # fmt: skip
            target += 5 * PROGRAMS
        score(program, counter, target, h, norm_last, shift_last, output_weight, logits, B, W, LOGIT_ROWS, BLOCK_W)
        target += PROGRAMS
        wait(counter, target)
        for stream in tl.static_range(B):
            byte = choose(
                logits + stream * BYTES, tl.load(state + stream), position, temperature, top_k, top_p, FILTERED
            )  # fmt: skip
            given = tl.load(tokens + stream * length + position).to(tl.int32)
            byte = tl.where(position < tl.load(known + stream), given, byte)
            tl.store(chosen + program * B + stream, byte)
            if program == 0:
                tl.store(tokens + stream * length + position, byte.to(tl.uint8))
        tl.debug_barrier()
