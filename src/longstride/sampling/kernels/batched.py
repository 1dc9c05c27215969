"""Between the products of a step of many streams: kernels that read a product's result and write what the next one takes.

Activations are float32. A product with bfloat16 weights is made of three, one for each part of its input, x_0 + x_1 + x_2,
each bfloat16, together as precise as float32. So PARTS rows of a product's input stand for one, and its result is their sum:
[PARTS, B, IN] -> [PARTS, B, OUT]. With float32 weights PARTS is 1.
"""

import triton
import triton.language as tl

from longstride.attention.kernels.cached import attend_part, load_part, together
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embedded, normalized, wide


@triton.jit
def write_parts(x, parts, stride, offset, inside, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        rounded = x.to(parts.dtype.element_ty)
        tl.store(parts + part * stride + offset, rounded, inside)
        x -= rounded.to(tl.float32)


@triton.jit
def read_parts(parts, stride, offset, inside, PARTS: tl.constexpr):
    x = tl.load(parts + offset, inside, 0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts + part * stride + offset, inside, 0.0)
    return x


@triton.jit
def begin_step(
    chosen, position, token_table, place_table, places, h, W: tl.constexpr, DIMENSIONS: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """H_0 of each stream."""
    stream = tl.program_id(0)
    across = tl.arange(0, BLOCK_W)
    before = tl.load(chosen + stream)
    x = embedded(
        across, across < W, tl.load(position), before, token_table, place_table, places, W, DIMENSIONS
    )  # fmt: skip
    tl.store(h + stream * W + across, x, across < W)


@triton.jit
def add_and_normalize(
    h, added, bias, norm, shift, x, batch, ADD: tl.constexpr, W: tl.constexpr, PARTS_IN: tl.constexpr,
    PARTS_OUT: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """h += a product's result and its bias, unless there is none yet; x = norm(h)."""
    stream = tl.program_id(0)
    across = tl.arange(0, BLOCK_W)
    inside = across < W
    row = tl.load(h + stream * W + across, inside, 0.0)
    if ADD:
        row += read_parts(added, batch * W, stream * W + across, inside, PARTS_IN) + tl.load(bias + across, inside, 0.0)
        tl.store(h + stream * W + across, row, inside)
    scale, moved = tl.load(norm + across, inside, 0.0), tl.load(shift + across, inside, 0.0)
    result = normalized(row, tl.sum(tl.where(across == 0, row, 0.0), 0), inside, scale, moved, W)
    write_parts(result, x, batch * W, stream * W + across, inside, PARTS_OUT)


@triton.jit
def keep_and_look(
    qkv, bias, keys, values, slots, seen, counts, own, most, part_top, part_total, part_result, batch, scale,
    H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, PARTS: tl.constexpr, REST: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The newest key and value go to their slot; what each part of a head's keys gives."""
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = 2 * QK + H * D_V
    HALF: tl.constexpr = BLOCK_QK // 2
    item = tl.program_id(0)
    split = item % SPLITS
    head = item // SPLITS  # Of all streams' heads.
    listed, count = seen + wide(head % H) * most, tl.load(counts + head % H)
    key_base = keys + wide(head) * slots * D_QK
    value_base = values + wide(head) * slots * D_V
    part = load_part(listed, most, split, key_base, value_base, 1, TILE, 0, D_QK, D_V, BLOCK_QK, BLOCK_V)
    newest = tl.where(split == 0, tl.load(own + head % H), -1)
    across, along = tl.arange(0, HALF), tl.arange(0, BLOCK_V)
    row = head // H * OUT
    query = ()
    score = 0.0
    for half in tl.static_range(2):
        column = half * HALF + across
        inside = column < D_QK
        place = head % H * D_QK + column
        query_half = read_parts(qkv, batch * OUT, row + place, inside, PARTS) + tl.load(bias + place, inside, 0.0)
        query_half *= scale
        query = query + (query_half,)
        here = inside & (newest >= 0)
        key = read_parts(qkv, batch * OUT, row + QK + place, here, PARTS) + tl.load(bias + QK + place, here, 0.0)
        tl.store(key_base + wide(newest) * D_QK + column, key, here)
        score += tl.sum(key * query_half, 0)
    place = 2 * QK + head % H * D_V + along
    there = (along < D_V) & (newest >= 0)
    value = read_parts(qkv, batch * OUT, row + place, there, PARTS) + tl.load(bias + place, there, 0.0)
    rounded = value.to(values.dtype.element_ty)
    tl.store(value_base + wide(newest) * D_V + along, rounded, there)
    top, total, result = attend_part(
        query, part, listed, count, key_base, value_base, split, REST, SPLITS, 1, TILE, TILE, STAGES, D_QK, D_V, BLOCK_QK,
        BLOCK_V,
    )  # fmt: skip
    score = tl.where(newest >= 0, score, float("-inf"))
    top, total, result = together(top, total, result, score, 1.0, rounded.to(tl.float32))
    tl.store(part_top + item, top)
    tl.store(part_total + item, total)
    tl.store(part_result + item * D_V + along, result, along < D_V)


@triton.jit
def join_parts(
    part_top, part_total, part_result, x, batch, H: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What a head of a stream has seen, for the projection."""
    head = tl.program_id(0)
    split, along = tl.arange(0, SPLITS), tl.arange(0, BLOCK_V)
    item = head * SPLITS + split
    top = tl.load(part_top + item)
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(tl.load(part_total + item) * share, 0)
    result = tl.load(part_result + item[:, None] * D_V + along[None, :], (item >= 0)[:, None] & (along < D_V)[None, :], 0.0)
    seen = tl.sum(result * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    write_parts(seen, x, batch * H * D_V, head * D_V + along, along < D_V, PARTS)


@triton.jit
def activate(
    inner, bias, x, batch, F: tl.constexpr, PARTS: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """gelu, for the outer layer."""
    stream = tl.program_id(0)
    across = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = across < F
    y = read_parts(inner, batch * F, stream * F + across, inside, PARTS) + tl.load(bias + across, inside, 0.0)
    write_parts(y * tl.sigmoid(y * SLOPE), x, batch * F, stream * F + across, inside, PARTS)


@triton.jit
def end_step(
    logits, tokens, known, state, position, length, temperature, top_k, top_p, chosen, FILTERED: tl.constexpr
):  # fmt: skip
    """Each stream's byte, unless it is given."""
    stream = tl.program_id(0)
    here = tl.load(position)
    warmth, most, mass = tl.load(temperature), tl.load(top_k), tl.load(top_p)
    logit = tl.load(logits + stream * BYTES + tl.arange(0, BYTES))
    byte = choose(logit, tl.load(state + stream), here, warmth, most, mass, FILTERED)
    place = tokens + wide(stream) * length + here
    byte = tl.where(here < tl.load(known + stream), tl.load(place).to(tl.int32), byte)
    tl.store(chosen + stream, byte)
    tl.store(place, byte.to(tl.uint8))
