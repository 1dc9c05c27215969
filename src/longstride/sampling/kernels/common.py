"""What both ways to make bytes share: embedding, norm, and the choice of a byte."""

import triton
import triton.language as tl

from longstride.attention.kernels.meeting import wide

EPSILON = tl.constexpr(1e-5)
SLOPE = tl.constexpr(1.702)
BYTES = tl.constexpr(256)
START = tl.constexpr(256)
"""The row of the start vector, after those of the bytes."""


@triton.jit
def add_both(a_1, a_2, b_1, b_2):
    return a_1 + b_1, a_2 + b_2


@triton.jit
def normalized(x, near, weight, bias, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Layer normalization of x [BLOCK_W]. Mean and deviation come from one pass over the distances from `near`, a number not
    far from the mean: of the squares of x themselves too little would be left."""
    across = tl.arange(0, BLOCK_W)
    scale = tl.load(weight + across, across < W, 0.0)
    shift = tl.load(bias + across, across < W, 0.0)
    distance = tl.where(across < W, x - near, 0.0)
    sum_1, sum_2 = tl.reduce((distance, distance * distance), 0, add_both)
    mean = sum_1 / W
    deviation = tl.sqrt(tl.maximum(sum_2 / W - mean * mean, 0.0) + EPSILON)
    return tl.where(across < W, (distance - mean) / deviation * scale + shift, 0.0)


@triton.jit
def embed(
    stream, position, before, token_table, place_table, places, h, W: tl.constexpr, DIMENSIONS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """H_0 of a stream; each program writes all of it, and so need not wait for the others."""
    across = tl.arange(0, BLOCK_W)
    x = tl.load(token_table + before * W + across, across < W, 0.0)
    for dimension in tl.static_range(DIMENSIONS):
        first = tl.load(places + dimension * 3)
        index = position // tl.load(places + dimension * 3 + 1) % tl.load(places + dimension * 3 + 2)
        x += tl.load(place_table + wide(first + index) * W + across, across < W, 0.0)
    tl.store(h + stream * W + across, x, across < W)


@triton.jit
def mixed(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def choose(logits, state, position, temperature, top_k, top_p, FILTERED: tl.constexpr):
    """The byte, as `choose.py` has it: `state` is that of seed and sample."""
    byte = tl.arange(0, BYTES)
    logit = tl.load(logits + byte, cache_modifier=".cg").to(tl.float64) / temperature
    likely = tl.exp(logit - tl.max(logit, 0))
    likely = likely / tl.sum(likely, 0)
    if FILTERED:
        # Who comes before whom: [those before, each byte].
        ahead = (likely[:, None] > likely[None, :]) | (
            (likely[:, None] == likely[None, :]) & (byte[:, None] < byte[None, :])
        )
        rank = tl.sum(ahead.to(tl.int32), 0)
        likely = tl.where(rank < top_k, likely, 0.0)
        before = tl.sum(tl.where(ahead, likely[:, None], 0.0), 0)
        likely = tl.where(before < top_p * tl.sum(likely, 0), likely, 0.0)
    sums = tl.cumsum(likely, 0)
    uniform = (mixed(state.to(tl.uint64) + wide(position).to(tl.uint64)) >> 32).to(tl.float64) * 2.3283064365386963e-10
    return tl.sum((sums <= uniform * tl.max(sums, 0)).to(tl.int32), 0)
