"""A step of many streams: for each block four kernels for its products, one or two for attention, and two for norms.

Activations are float32. Products are of bfloat16 numbers, for speed: an input is the sum of three terms x_0 + x_1 + x_2,
together as precise as float32: [terms, B, inputs]; and so is a weight, [weight_terms, outputs, inputs], where it needs more
than one. To have enough programs, a product may be split over its inputs into shares, [shares, B, outputs], which the kernel
that reads the result adds up.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.sampling.kernels.arguments import Norm
from longstride.sampling.kernels.cached_attention import HeadCache, SoftmaxState, attend_tiles, merge
from longstride.sampling.kernels.common import BYTES, SLOPE, choose, embedded, normalized, wide


@triton.jit
def write_terms(x, out, stride, offset, inside, TERMS: tl.constexpr):
    """Writes x as a sum of TERMS numbers of out's dtype, `stride` apart."""
    for term in tl.static_range(TERMS):
        rounded = x.to(out.dtype.element_ty)
        tl.store(out + term * stride + offset, rounded, inside)
        x -= rounded.to(tl.float32)


@triton.jit
def read_product(shares, bias, row, column, inside, batch, OUT: tl.constexpr, SHARES: tl.constexpr):
    """Returns columns of a product's result, [SHARES, batch, OUT], with its bias."""
    offset = row * OUT + column
    x = tl.load(shares + offset, inside, 0.0)
    for share in tl.static_range(1, SHARES):
        x += tl.load(shares + share * batch * OUT + offset, inside, 0.0)
    return x + tl.load(bias + column, inside, 0.0)


@triton.jit
def multiply(x, weight, bias, out, batch, SIZES: tl.constexpr, ACTIVATE: tl.constexpr):
    """out = x weight^T, in shares; with ACTIVATE, gelu(x weight^T + bias) in terms. SIZES: `ProductSizes`."""
    IN: tl.constexpr = SIZES.inputs
    OUT: tl.constexpr = SIZES.outputs
    row = tl.program_id(0) * SIZES.rows + tl.arange(0, SIZES.rows)
    column = tl.program_id(1) * SIZES.columns + tl.arange(0, SIZES.columns)
    first = tl.program_id(2) * SIZES.share
    y = tl.zeros([SIZES.rows, SIZES.columns], tl.float32)
    small = tl.zeros([SIZES.rows, SIZES.columns], tl.float32)  # Of the smaller terms, so that y does not round them off.
    for start in range(0, SIZES.share, SIZES.block_in):
        input = first + start + tl.arange(0, SIZES.block_in)
        inside = (input < IN)[:, None] & (column < OUT)[None, :]
        matrices = ()
        for weight_term in tl.static_range(SIZES.weight_terms):
            address = weight + weight_term * OUT * IN + column[None, :] * IN + input[:, None]
            matrices = matrices + (tl.load(address, inside, 0.0),)
        inside = (row < batch)[:, None] & (input < IN)[None, :]
        for term in tl.static_range(SIZES.terms):
            rows = tl.load(x + term * batch * IN + row[:, None] * IN + input[None, :], inside, 0.0)
            # Each term is about 2^-8 of the one before: the products left out are below the rounding error of float32.
            for weight_term in tl.static_range(SIZES.weight_terms):
                if term + weight_term == 0:
                    y = tl.dot(rows, matrices[weight_term], y, input_precision="ieee")
                elif term + weight_term < SIZES.terms:
                    small = tl.dot(rows, matrices[weight_term], small, input_precision="ieee")
    y += small
    inside = (row < batch)[:, None] & (column < OUT)[None, :]
    offset = row[:, None] * OUT + column[None, :]
    if ACTIVATE:
        y += tl.load(bias + column, column < OUT, 0.0)[None, :]
        write_terms(y * tl.sigmoid(y * SLOPE), out, batch * OUT, offset, inside, SIZES.terms)
    else:
        tl.store(out + tl.program_id(2) * batch * OUT + offset, y, inside)


@triton.jit
def begin_step(last_bytes, position, embedding, h, NETWORK: tl.constexpr, EACH: tl.constexpr):
    """Writes each stream's embedding to h. EACH: whether each has a position of its own."""
    W: tl.constexpr = NETWORK.width
    stream = tl.program_id(0)
    column = tl.arange(0, NETWORK.block_width)
    byte = tl.load(last_bytes + stream)
    at = tl.load(position + stream) if EACH else tl.load(position)
    x = embedded(column, column < W, at, byte, embedding, NETWORK)
    tl.store(h + stream * W + column, x, column < W)


@triton.jit
def add_and_normalize(
    h, added, bias, norm, x, batch, ADD: tl.constexpr, SHARES: tl.constexpr, TERMS: tl.constexpr, NETWORK: tl.constexpr
):  # fmt: skip
    """h += added + bias, if ADD, where `added` is a product's result; then x = norm(h) in TERMS."""
    W: tl.constexpr = NETWORK.width
    stream = tl.program_id(0)
    column = tl.arange(0, NETWORK.block_width)
    inside = column < W
    row = tl.load(h + stream * W + column, inside, 0.0)
    norm = Norm(tl.load(norm.scale + column, inside, 0.0), tl.load(norm.shift + column, inside, 0.0))
    if ADD:
        row += read_product(added, bias, stream, column, inside, batch, W, SHARES)
        tl.store(h + stream * W + column, row, inside)
    result = normalized(row, tl.sum(tl.where(column == 0, row, 0.0), 0), inside, norm, W)
    write_terms(result, x, batch * W, stream * W + column, inside, TERMS)


@triton.jit
def attend_cached(
    qkv, bias, cache, visible, parts, x, batch, NETWORK: tl.constexpr, HEAD: tl.constexpr, SIZES: tl.constexpr
):  # fmt: skip
    """Attention of one head of a stream, or of a split of its keys; the newest key and value go to the cache.

    qkv, bias: the result of a product. cache: `BlockCache`; visible: `VisibleSlots` of the block's heads. SIZES:
    `AttentionSizes`. Without splits, x gets the result in terms; with splits, `parts` gets the `SoftmaxState` of each.
    """
    D_QK: tl.constexpr = HEAD.d_qk
    D_V: tl.constexpr = HEAD.d_v
    H: tl.constexpr = NETWORK.heads
    QK: tl.constexpr = H * D_QK
    OUT: tl.constexpr = NETWORK.qkv_width
    HALF: tl.constexpr = HEAD.block_qk // 2
    item = tl.program_id(0)
    split = item % SIZES.splits
    stream_head = item // SIZES.splits
    stream, head = stream_head // H, stream_head % H
    listed = stream * NETWORK.cycle * H + head if SIZES.each else head
    slots, count = visible.slots + wide(listed) * visible.capacity, tl.load(visible.counts + listed)
    own_slot = tl.where(split == 0, tl.load(visible.own + listed), -1)
    keys = cache.k + wide(stream_head) * cache.slots * D_QK
    values = cache.v + wide(stream_head) * cache.slots * D_V
    qk_column, v_column = tl.arange(0, HALF), tl.arange(0, HEAD.block_v)
    query, key = (), ()
    for half in tl.static_range(2):
        column = half * HALF + qk_column
        inside = column < D_QK
        first = head * D_QK + column
        query = query + (read_product(qkv, bias, stream, first, inside, batch, OUT, SIZES.shares) * HEAD.scale,)
        key = key + (read_product(qkv, bias, stream, QK + first, inside, batch, OUT, SIZES.shares),)
    first = 2 * QK + head * D_V + v_column
    value = read_product(qkv, bias, stream, first, v_column < D_V, batch, OUT, SIZES.shares)
    # A value that the query does not see must not count, even if it is infinite.
    rounded = tl.where(own_slot >= 0, value, 0.0).to(cache.v.dtype.element_ty)
    state = attend_tiles(
        query, HeadCache(keys, values), slots, count, split * SIZES.tile, SIZES.splits * SIZES.tile, SIZES.tile,
        SIZES.stages, HEAD,
    )  # fmt: skip
    score = tl.sum(query[0] * key[0] + query[1] * key[1], 0)
    if own_slot >= 0:
        for half in tl.static_range(2):
            column = half * HALF + qk_column
            tl.store(keys + wide(own_slot) * D_QK + column, key[half], column < D_QK)
        tl.store(values + wide(own_slot) * D_V + v_column, rounded, v_column < D_V)
    score = tl.where(own_slot >= 0, score, float("-inf"))
    state = merge(state, SoftmaxState(score, 1.0, rounded.to(tl.float32)))
    if SIZES.splits == 1:
        result = state.accumulator / tl.where(state.total > 0, state.total, 1.0)
        write_terms(result, x, batch * H * D_V, stream_head * D_V + v_column, v_column < D_V, SIZES.terms)
    else:
        tl.store(parts.maximum + item, state.maximum)
        tl.store(parts.total + item, state.total)
        tl.store(parts.accumulator + item * D_V + v_column, state.accumulator, v_column < D_V)


@triton.jit
def merge_parts(
    parts, x, batch, NETWORK: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """Writes the attention of one head of a stream to x, in TERMS, from the parts of its splits."""
    D_V: tl.constexpr = HEAD.d_v
    stream_head = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, HEAD.block_v)
    item = stream_head * SPLITS + split
    maximum = tl.load(parts.maximum + item)
    largest = tl.max(maximum, 0)
    rescale = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(tl.load(parts.total + item) * rescale, 0)
    inside = (item >= 0)[:, None] & (column < D_V)[None, :]
    accumulator = tl.load(parts.accumulator + item[:, None] * D_V + column[None, :], inside, 0.0)
    result = tl.sum(accumulator * rescale[:, None], 0) / tl.where(total > 0, total, 1.0)
    write_terms(result, x, batch * NETWORK.heads * D_V, stream_head * D_V + column, column < D_V, TERMS)


@triton.jit
def end_step(logits, streams, length, position, choice, FILTERED: tl.constexpr):
    """Chooses each stream's byte, unless it belongs to the prompt. streams: `Streams` of this length; choice: `Choice`."""
    stream = tl.program_id(0)
    at = tl.load(position)
    temperature, top_k, top_p = tl.load(choice.temperature), tl.load(choice.top_k), tl.load(choice.top_p)
    logit = tl.load(logits + stream * BYTES + tl.arange(0, BYTES))
    byte = choose(logit, tl.load(streams.random_states + stream), at, temperature, top_k, top_p, FILTERED)
    token = streams.tokens + wide(stream) * length + at
    byte = tl.where(at < tl.load(streams.prompt_lengths + stream), tl.load(token).to(tl.int32), byte)
    tl.store(streams.last_bytes + stream, byte)
    tl.store(token, byte.to(tl.uint8))


@triton.jit
def end_placed_step(logits, streams, position, choice, length, SIZE: tl.constexpr, FILTERED: tl.constexpr):
    """Chooses the byte of each active stream, and moves its position on. streams: `PlacedStreams` with SIZE newest bytes.

    A stream that waits computes as if it were active, at most at the last position: what it writes to its cache there is
    never read, since it begins anew or writes it again.
    """
    stream = tl.program_id(0)
    at, active = tl.load(position + stream), tl.load(streams.active + stream)
    temperature, top_k = tl.load(choice.temperature + stream), tl.load(choice.top_k + stream)
    logit = tl.load(logits + stream * BYTES + tl.arange(0, BYTES))
    state = tl.load(streams.random_states + stream)
    byte = choose(logit, state, at, temperature, top_k, tl.load(choice.top_p + stream), FILTERED)
    finite = tl.min((logit - logit == 0.0).to(tl.int32), 0)
    tl.store(streams.last_bytes + stream, byte, active > 0)
    tl.store(streams.made + stream * SIZE + at % SIZE, byte.to(tl.uint8), active > 0)
    tl.store(streams.broken + stream, 1, (active > 0) & (finite == 0))
    tl.store(position + stream, tl.minimum(at + active, length - 1))
