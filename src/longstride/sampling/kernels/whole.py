"""Many bytes in one kernel: all programs stay on the GPU and go through the network together, byte after byte.

What one stream waits for is not arithmetic but latency: of launches, of memory, of one program for another. Here nothing is
launched between bytes; programs meet at a counter after each phase of a block, and before they wait for each other load what
is there already: weights, and what an earlier phase has left. Until it has to be added to that of others, the work of a head
is shared by a group of G workers and as many lookers, which meet among themselves:

    1 query, key and value of the new byte       workers    rows of W_qkv that belong to the head
    2 attention to a part of the head's keys     lookers    parts of the keys
    3 the parts put together, and projected      workers    rows of W_p, of which a head has some columns    then all meet
    4 the feed-forward network's inner layer     workers    rows of W_1, over all of them                    then all meet
    5 its outer layer                            workers    rows of W_2                                      then all meet

then the logits, from which each worker chooses the next byte for itself, as all choose the same, and embeds it. Lookers do
nothing else, so that they load keys and values of the next block while workers go through phases 3 to 5. Where there are few
keys there are no lookers: workers are as fast, and need not be told.

Shapes: width W, inner F, streams B, heads H. Activations are float32 throughout, weights as the model's precision has them.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.cached import attend_part, load_part
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embedded, normalized, wide
from longstride.sampling.kernels.meeting import arrive, fresh, wait

COUNTER = tl.constexpr(32)
"""Words from one counter to the next: they are not in the same line of memory."""


@triton.jit
def own_rows(program, PROGRAMS: tl.constexpr, ROWS: tl.constexpr):
    """So spread that each program has some, if there are as many."""
    return program + tl.arange(0, ROWS) * PROGRAMS


@triton.jit
def load_rows(weight, bias, row, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Of a matrix [OUT, IN] and its bias: [rows, BLOCK_IN] and [rows]; zeros past their end."""
    across = tl.arange(0, BLOCK_IN)
    part = tl.load(weight + row[:, None] * IN + across[None, :], (row < OUT)[:, None] & (across < IN)[None, :], 0.0)
    return part, tl.load(bias + row, row < OUT, 0.0)


@triton.jit
def load_norm(scale, shift, W: tl.constexpr, BLOCK_W: tl.constexpr):
    across = tl.arange(0, BLOCK_W)
    return tl.load(scale + across, across < W, 0.0), tl.load(shift + across, across < W, 0.0)


@triton.jit
def first_of(x):
    """For `normalized`: no number is far from the mean, so any will do."""
    return tl.load(x, cache_modifier=".cg")


@triton.jit
def product(part, x):
    """Of rows with x [BLOCK_IN]."""
    return tl.sum(part.to(tl.float32) * x[None, :], 1)


@triton.jit
def seen_by_heads(projected, column, inside, H: tl.constexpr, W: tl.constexpr):
    """Columns of what attention adds to h, without its bias: of a stream, for each head [H, W]."""
    seen = fresh(projected + column, inside)
    for head in tl.static_range(1, H):
        seen += fresh(projected + head * W + column, inside)
    return seen


@triton.jit
def after_attention(h, projected, column, inside, H: tl.constexpr, W: tl.constexpr):
    return fresh(h + column, inside) + seen_by_heads(projected, column, inside, H, W)


@triton.jit
def query_key_value(
    group, member, counter, target, h, weight, bias, norm, shift, qkv, keys, values, slots, own, scale, GROUPS: tl.constexpr,
    G: tl.constexpr, HEAD_TURNS: tl.constexpr, B: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr,
    D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Phase 1. Keys and values go to their slots."""
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = 2 * QK + W
    across = tl.arange(0, BLOCK_W)
    number = own_rows(member, G, ROWS)  # Of the head's own queries, keys and values.
    is_key = (number >= D_QK) & (number < 2 * D_QK)
    is_value = (number >= 2 * D_QK) & (number < 2 * D_QK + D_V)
    norm_scale, norm_shift = load_norm(norm, shift, W, BLOCK_W)
    for turn in tl.static_range(HEAD_TURNS):
        head = group + turn * GROUPS
        row = tl.where(is_key, QK + head * D_QK + number - D_QK, 2 * QK + head * D_V + number - 2 * D_QK)
        row = tl.where(number < D_QK, head * D_QK + number, row)
        inside = (number < 2 * D_QK + D_V) & (head < H)
        row = tl.where(inside, row, OUT)
        part, added = load_rows(weight, bias, row, OUT, W, BLOCK_W)
        kept = tl.load(own + tl.minimum(head, H - 1))
        wait(counter, target)
        for stream in tl.static_range(B):
            x = fresh(h + stream * W + across, across < W)
            y = product(part, normalized(x, first_of(h + stream * W), across < W, norm_scale, norm_shift, W)) + added
            tl.store(qkv + stream * OUT + row, tl.where(number < D_QK, y * scale, y), inside)
            place = wide(stream * H + head) * slots + kept
            tl.store(keys + place * D_QK + number - D_QK, y, is_key & inside & (kept >= 0))
            rounded = y.to(values.dtype.element_ty)
            tl.store(values + place * D_V + number - 2 * D_QK, rounded, is_value & inside & (kept >= 0))
        if head < H:
            arrive(counter + (1 + head) * COUNTER)


@triton.jit
def look(
    group, member, counter, target, qkv, keys, values, slots, seen, counts, most, part_top, part_total, part_result,
    GROUPS: tl.constexpr, G: tl.constexpr, HEAD_TURNS: tl.constexpr, TURNS: tl.constexpr, SPLITS: tl.constexpr,
    PAUSE: tl.constexpr, B: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    REST: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Phase 2. The newest key is not among those that are looked at, so they are loaded before there is a query."""
    OUT: tl.constexpr = 2 * H * D_QK + W
    HALF: tl.constexpr = BLOCK_QK // 2
    across, along = tl.arange(0, HALF), tl.arange(0, BLOCK_V)
    for head_turn in tl.static_range(HEAD_TURNS):
        for turn in tl.static_range(TURNS):
            head, item = group + head_turn * GROUPS, member + turn * G
            stream, split = item // SPLITS, item % SPLITS
            if (head < H) & (stream < B):
                listed = seen + wide(head) * most
                first_slot = wide(stream * H + head) * slots
                key_base, value_base = keys + first_slot * D_QK, values + first_slot * D_V
                part = load_part(
                    listed, most, split, key_base, value_base, CHUNKS, CHUNK, PAUSE, D_QK, D_V, BLOCK_QK, BLOCK_V
                )  # fmt: skip
                count = 0
                if REST:
                    count = tl.load(counts + head)
                wait(counter + (1 + head) * COUNTER, target)
                place = qkv + stream * OUT + head * D_QK + across
                query = (fresh(place, across < D_QK), fresh(place + HALF, HALF + across < D_QK))
                top, total, result = attend_part(
                    query, part, listed, count, key_base, value_base, split, REST, SPLITS, CHUNKS, CHUNK, TILE, D_QK, D_V,
                    BLOCK_QK, BLOCK_V,
                )  # fmt: skip
                number = (stream * H + head) * SPLITS + split
                tl.store(part_top + number, top)
                tl.store(part_total + number, total)
                tl.store(part_result + number * D_V + along, result, along < D_V)
                arrive(counter + (1 + head) * COUNTER)


@triton.jit
def put_together(
    group, member, counter, target, qkv, own, part_top, part_total, part_result, weight, projected, values,
    GROUPS: tl.constexpr, G: tl.constexpr, HEAD_TURNS: tl.constexpr, TURNS: tl.constexpr, SPLITS: tl.constexpr,
    LOOKERS: tl.constexpr, B: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Phase 3. The newest key is one more part, which is looked at while the others are on their way."""
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = 2 * QK + W
    across, along, number = tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_V), tl.arange(0, SPLITS)
    for head_turn in tl.static_range(HEAD_TURNS):
        for turn in tl.static_range(TURNS):
            head, item = group + head_turn * GROUPS, member + turn * G
            stream, share = item // SPLITS, item % SPLITS
            if (head < H) & (stream < B):
                row = own_rows(share, SPLITS, ROWS)
                there = (row < W)[:, None] & (along < D_V)[None, :]
                columns = tl.load(weight + row[:, None] * W + head * D_V + along[None, :], there, 0.0)
                newest = tl.load(own + head)
                if LOOKERS:  # Or else it has waited for phase 1 in phase 2.
                    wait(counter + (1 + head) * COUNTER, target - B * SPLITS)
                place = qkv + stream * OUT + head * D_QK + across
                score = tl.sum(fresh(place, across < D_QK) * fresh(place + QK, across < D_QK), 0)
                value = fresh(qkv + stream * OUT + 2 * QK + head * D_V + along, along < D_V)
                value = tl.where(newest >= 0, value, 0.0).to(values.dtype.element_ty).to(tl.float32)
                part = (stream * H + head) * SPLITS + number
                wait(counter + (1 + head) * COUNTER, target)
                top, total = fresh(part_top + part, number >= 0), fresh(part_total + part, number >= 0)
                result = fresh(
                    part_result + part[:, None] * D_V + along[None, :], (number >= 0)[:, None] & (along < D_V)[None, :]
                )  # fmt: skip
                score = tl.where(newest >= 0, score, float("-inf"))
                highest = tl.maximum(tl.max(top, 0), score)
                highest = tl.where(highest == float("-inf"), 0.0, highest)
                fade, weight_here = tl.exp2(top - highest), tl.exp2(score - highest)
                whole = tl.sum(total * fade, 0) + weight_here
                found = (tl.sum(result * fade[:, None], 0) + weight_here * value) / tl.where(whole > 0, whole, 1.0)
                tl.store(projected + (stream * H + head) * W + row, product(columns, found), row < W)
    arrive(counter)


@triton.jit
def inner_layer(
    program, counter, target, h, projected, project_bias, weight, bias, norm, shift, inner, WORKERS: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, F: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Phase 4."""
    row, across = own_rows(program, WORKERS, ROWS), tl.arange(0, BLOCK_W)
    part, added = load_rows(weight, bias, row, F, W, BLOCK_W)
    norm_scale, norm_shift = load_norm(norm, shift, W, BLOCK_W)
    moved = tl.load(project_bias + across, across < W, 0.0)
    before = fresh(h + across, across < W) if B == 1 else 0.0  # Of more, there are not the registers to have it that early.
    wait(counter, target)
    for stream in tl.static_range(B):
        if B > 1:
            before = fresh(h + stream * W + across, across < W)
        x = before + moved + seen_by_heads(projected + stream * H * W, across, across < W, H, W)
        y = product(part, normalized(x, first_of(h + stream * W), across < W, norm_scale, norm_shift, W)) + added
        tl.store(inner + stream * F + row, y * tl.sigmoid(y * SLOPE), row < F)
    arrive(counter)


@triton.jit
def outer_layer(
    program, counter, target, inner, h, projected, project_bias, weight, bias, h_next, WORKERS: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, F: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Phase 5: the block's result. May overwrite h, of which the program needs its own rows alone now."""
    row, across = own_rows(program, WORKERS, ROWS), tl.arange(0, BLOCK_F)
    part, added = load_rows(weight, bias, row, W, F, BLOCK_F)
    added += tl.load(project_bias + row, row < W, 0.0)
    before = after_attention(h, projected, row, row < W, H, W) if B == 1 else 0.0
    wait(counter, target)
    for stream in tl.static_range(B):
        if B > 1:
            before = after_attention(h + stream * W, projected + stream * H * W, row, row < W, H, W)
        y = product(part, fresh(inner + stream * F + across, across < F))
        tl.store(h_next + stream * W + row, before + added + y, row < W)
    arrive(counter)


@triton.jit
def score(
    program, counter, target, h, norm, shift, weight, logits, WORKERS: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The logits."""
    row, across = own_rows(program, WORKERS, ROWS), tl.arange(0, BLOCK_W)
    part = tl.load(weight + row[:, None] * W + across[None, :], (row < BYTES)[:, None] & (across < W)[None, :], 0.0)
    norm_scale, norm_shift = load_norm(norm, shift, W, BLOCK_W)
    wait(counter, target)
    for stream in tl.static_range(B):
        x = fresh(h + stream * W + across, across < W)
        y = product(part, normalized(x, first_of(h + stream * W), across < W, norm_scale, norm_shift, W))
        tl.store(logits + stream * BYTES + row, y, row < BYTES)
    arrive(counter)


@triton.jit(do_not_specialize=["steps", "length", "top_k"])
def make_bytes(
    tokens, known, state, position_first, steps, length, temperature, top_k, top_p,
    token_table, place_table, places,
    norm_1, shift_1, qkv_weight, qkv_bias, project_weight, project_bias,
    norm_2, shift_2, inner_weight, inner_bias, outer_weight, outer_bias,
    norm_last, shift_last, output_weight,
    key_cache, value_cache, starts, slot_counts, seen, counts, own, most,
    h, first_h, qkv, part_top, part_total, part_result, projected, inner, logits, chosen, counter, scale,
    WORKERS: tl.constexpr, LOOKERS: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr, PAUSE: tl.constexpr,
    LAYERS: tl.constexpr, CYCLE: tl.constexpr, B: tl.constexpr, W: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    D_QK: tl.constexpr, D_V: tl.constexpr, DIMENSIONS: tl.constexpr, REST: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, FILTERED: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, QKV_ROWS: tl.constexpr, PROJECT_ROWS: tl.constexpr,
    WIDTH_ROWS: tl.constexpr, INNER_ROWS: tl.constexpr, LOGIT_ROWS: tl.constexpr,
):  # fmt: skip
    """`steps` bytes of B streams from position `position_first` on; those below `known` are given.

    seen, counts and own are what `list_seen` writes, for the heads of a CYCLE of blocks. `counter`: one for all workers,
    and one for each head's programs, all 0. `first_h` [WORKERS, B, W]: each worker embeds bytes for itself. With LOOKERS
    there are as many of them; without, workers look, too.
    """
    OUT: tl.constexpr = 2 * H * D_QK + W
    GROUPS: tl.constexpr = WORKERS // G
    HEAD_TURNS: tl.constexpr = (H + GROUPS - 1) // GROUPS
    TURNS: tl.constexpr = (B * SPLITS + G - 1) // G
    first = tl.load(position_first)
    program = tl.program_id(0) % WORKERS
    group, member = program // G, program % G
    if tl.program_id(0) < WORKERS:
        first_h += program * B * W
        across = tl.arange(0, BLOCK_W)
        target = 0
        head_target = 0
        for step in range(steps):
            position = first + step
            for stream in tl.static_range(B):
                before = tl.load(chosen + program * B + stream)
                x = embedded(across, across < W, position, before, token_table, place_table, places, W, DIMENSIONS)
                tl.store(first_h + stream * W + across, x, across < W)
            tl.debug_barrier()
            for layer in range(LAYERS):
                here = (step * CYCLE + layer % CYCLE) * H
                start, slots = tl.load(starts + layer), tl.load(slot_counts + layer)
                keys, values = key_cache + start * D_QK, value_cache + start * D_V
                h_in = first_h if layer == 0 else h
                query_key_value(
                    group, member, counter, target, h_in, qkv_weight + wide(layer) * OUT * W, qkv_bias + layer * OUT,
                    norm_1 + layer * W, shift_1 + layer * W, qkv, keys, values, slots, own + here, scale, GROUPS, G,
                    HEAD_TURNS, B, W, H, D_QK, D_V, QKV_ROWS, BLOCK_W,
                )  # fmt: skip
                head_target += G
                if not LOOKERS:
                    look(
                        group, member, counter, head_target, qkv, keys, values, slots, seen + wide(here) * most,
                        counts + here, most, part_top, part_total, part_result, GROUPS, G, HEAD_TURNS, TURNS, SPLITS, PAUSE,
                        B, W, H, D_QK, D_V, REST, CHUNKS, CHUNK, TILE, BLOCK_QK, BLOCK_V,
                    )  # fmt: skip
                head_target += B * SPLITS
                put_together(
                    group, member, counter, head_target, qkv, own + here, part_top, part_total, part_result,
                    project_weight + wide(layer) * W * W, projected, values, GROUPS, G, HEAD_TURNS, TURNS, SPLITS, LOOKERS,
                    B, W, H, D_QK, D_V, PROJECT_ROWS, BLOCK_QK, BLOCK_V,
                )  # fmt: skip
                inner_layer(
                    program, counter, target + WORKERS, h_in, projected, project_bias + layer * W,
                    inner_weight + wide(layer) * F * W, inner_bias + layer * F, norm_2 + layer * W, shift_2 + layer * W,
                    inner, WORKERS, B, W, F, H, INNER_ROWS, BLOCK_W,
                )  # fmt: skip
                outer_layer(
                    program, counter, target + 2 * WORKERS, inner, h_in, projected, project_bias + layer * W,
                    outer_weight + wide(layer) * W * F, outer_bias + layer * W, h, WORKERS, B, W, F, H, WIDTH_ROWS, BLOCK_F,
                )  # fmt: skip
                target += 3 * WORKERS
            score(
                program, counter, target, h, norm_last, shift_last, output_weight, logits, WORKERS, B, W, LOGIT_ROWS, BLOCK_W
            )  # fmt: skip
            target += WORKERS
            wait(counter, target)
            for stream in tl.static_range(B):
                logit = tl.load(logits + stream * BYTES + tl.arange(0, BYTES), cache_modifier=".cg")
                byte = choose(logit, tl.load(state + stream), position, temperature, top_k, top_p, FILTERED)
                given = tl.load(tokens + stream * length + position).to(tl.int32)
                byte = tl.where(position < tl.load(known + stream), given, byte)
                tl.store(chosen + program * B + stream, byte)
                if program == 0:
                    tl.store(tokens + stream * length + position, byte.to(tl.uint8))
            tl.debug_barrier()
    else:
        if LOOKERS:  # The others: all that they do.
            head_target = G
            for step in range(steps):
                for layer in range(LAYERS):
                    here = (step * CYCLE + layer % CYCLE) * H
                    start, slots = tl.load(starts + layer), tl.load(slot_counts + layer)
                    keys, values = key_cache + start * D_QK, value_cache + start * D_V
                    look(
                        group, member, counter, head_target, qkv, keys, values, slots, seen + wide(here) * most,
                        counts + here, most, part_top, part_total, part_result, GROUPS, G, HEAD_TURNS, TURNS, SPLITS, PAUSE,
                        B, W, H, D_QK, D_V, REST, CHUNKS, CHUNK, TILE, BLOCK_QK, BLOCK_V,
                    )  # fmt: skip
                    head_target += G + B * SPLITS
