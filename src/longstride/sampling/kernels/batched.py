"""A step of many streams: for each block four kernels for its products, one or two for attention, and two for norms.

Activations are float32. Products are of bfloat16 numbers, which is what is fast: an input is the sum of three of them,
x_0 + x_1 + x_2, together as precise as float32: [PARTS, B, IN]; and so is a weight, [OF, OUT, IN], where it needs more
than one. Its result may be left as SHARES sums, each over a part of IN, so that there are enough programs; who reads it
adds them up: [SHARES, B, OUT].
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.cached import attend_listed, together
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embedded, normalized, wide


@triton.jit
def write_parts(x, parts, stride, offset, inside, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        rounded = x.to(parts.dtype.element_ty)
        tl.store(parts + part * stride + offset, rounded, inside)
        x -= rounded.to(tl.float32)


@triton.jit
def read_product(shares, bias, row, column, inside, batch, OUT: tl.constexpr, SHARES: tl.constexpr):
    """Columns of a product's result, [SHARES, batch, OUT], with its bias."""
    place = row * OUT + column
    x = tl.load(shares + place, inside, 0.0)
    for share in tl.static_range(1, SHARES):
        x += tl.load(shares + share * batch * OUT + place, inside, 0.0)
    return x + tl.load(bias + column, inside, 0.0)


@triton.jit
def multiply(
    x, weight, bias, out, batch, ACTIVATE: tl.constexpr, PARTS: tl.constexpr, OF: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """x [PARTS, batch, IN] weight^T: the sums over each SHARE of IN; or gelu of that and a bias, in PARTS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * SHARE
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    small = tl.zeros([ROWS, COLUMNS], tl.float32)  # Of the smaller parts, whose last bits a larger sum would round off.
    for start in range(0, SHARE, BLOCK_IN):
        across = first + start + tl.arange(0, BLOCK_IN)
        there = (across < IN)[:, None] & (column < OUT)[None, :]
        matrices = ()
        for of in tl.static_range(OF):
            matrices = matrices + (tl.load(weight + of * OUT * IN + column[None, :] * IN + across[:, None], there, 0.0),)
        inside = (row < batch)[:, None] & (across < IN)[None, :]
        for part in tl.static_range(PARTS):
            rows = tl.load(x + part * batch * IN + row[:, None] * IN + across[None, :], inside, 0.0)
            # Each part is about 2^-8 of the one before: the products that are left out are less than float32 rounds off.
            for of in tl.static_range(OF):
                if part + of == 0:
                    y = tl.dot(rows, matrices[of], y, input_precision="ieee")
                elif part + of < PARTS:
                    small = tl.dot(rows, matrices[of], small, input_precision="ieee")
    y += small
    inside = (row < batch)[:, None] & (column < OUT)[None, :]
    place = row[:, None] * OUT + column[None, :]
    if ACTIVATE:
        y += tl.load(bias + column, column < OUT, 0.0)[None, :]
        write_parts(y * tl.sigmoid(y * SLOPE), out, batch * OUT, place, inside, PARTS)
    else:
        tl.store(out + tl.program_id(2) * batch * OUT + place, y, inside)


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
    h, added, bias, norm, shift, x, batch, ADD: tl.constexpr, W: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """h += a product's result and its bias, unless there is none yet; x = norm(h)."""
    stream = tl.program_id(0)
    across = tl.arange(0, BLOCK_W)
    inside = across < W
    row = tl.load(h + stream * W + across, inside, 0.0)
    scale, moved = tl.load(norm + across, inside, 0.0), tl.load(shift + across, inside, 0.0)
    if ADD:
        row += read_product(added, bias, stream, across, inside, batch, W, SHARES)
        tl.store(h + stream * W + across, row, inside)
    result = normalized(row, tl.sum(tl.where(across == 0, row, 0.0), 0), inside, scale, moved, W)
    write_parts(result, x, batch * W, stream * W + across, inside, PARTS)


@triton.jit
def keep_and_look(
    qkv, bias, keys, values, slots, seen, counts, own, most, part_top, part_total, part_result, x, batch, scale,
    H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The newest key and value go to their slot; what a head has seen in x, or what each part of its keys gives."""
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = 2 * QK + H * D_V
    HALF: tl.constexpr = BLOCK_QK // 2
    item = tl.program_id(0)
    split = item % SPLITS
    head = item // SPLITS  # Of all streams' heads.
    listed, count = seen + wide(head % H) * most, tl.load(counts + head % H)
    newest = tl.where(split == 0, tl.load(own + head % H), -1)
    key_base = keys + wide(head) * slots * D_QK
    value_base = values + wide(head) * slots * D_V
    across, along = tl.arange(0, HALF), tl.arange(0, BLOCK_V)
    stream, first = head // H, head % H * D_QK
    query, key = (), ()
    for half in tl.static_range(2):
        column = half * HALF + across
        inside = column < D_QK
        query = query + (read_product(qkv, bias, stream, first + column, inside, batch, OUT, SHARES) * scale,)
        key = key + (read_product(qkv, bias, stream, QK + first + column, inside, batch, OUT, SHARES),)
    value = read_product(qkv, bias, stream, 2 * QK + head % H * D_V + along, along < D_V, batch, OUT, SHARES)
    rounded = tl.where(newest >= 0, value, 0.0).to(values.dtype.element_ty)  # Or else it is not to count, even if infinite.
    top, total, result = attend_listed(
        query, listed, count, key_base, value_base, split * TILE, SPLITS * TILE, TILE, STAGES, D_QK, D_V, BLOCK_QK, BLOCK_V
    )  # fmt: skip
    score = tl.sum(query[0] * key[0] + query[1] * key[1], 0)
    if newest >= 0:
        for half in tl.static_range(2):
            column = half * HALF + across
            tl.store(key_base + wide(newest) * D_QK + column, key[half], column < D_QK)
        tl.store(value_base + wide(newest) * D_V + along, rounded, along < D_V)
    score = tl.where(newest >= 0, score, float("-inf"))
    top, total, result = together(top, total, result, score, 1.0, rounded.to(tl.float32))
    if SPLITS == 1:
        result /= tl.where(total > 0, total, 1.0)
        write_parts(result, x, batch * H * D_V, head * D_V + along, along < D_V, PARTS)
    else:
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
