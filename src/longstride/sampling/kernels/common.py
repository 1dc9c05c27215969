"""Functions that the resident and the batched kernels share: embedding, layer norm, the choice of a byte, addresses."""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.model import embedding, layers
from longstride.sampling.sampler import RANDOM_BITS, SPLITMIX64

EPSILON = tl.constexpr(layers.EPSILON)
SLOPE = tl.constexpr(layers.SLOPE)
BYTES = tl.constexpr(embedding.BYTES)
START = tl.constexpr(embedding.BYTES)
"""The row of the start vector, after those of the bytes."""
FIRST_MIX, SECOND_MIX, THIRD_MIX = (tl.constexpr(number) for number in SPLITMIX64)
UNUSED_BITS = tl.constexpr(64 - RANDOM_BITS)
UNIT = tl.constexpr(2.0**-RANDOM_BITS)


@triton.jit
def wide(index):
    """Returns an integer as int64, for offsets that may exceed 32 bits."""
    return tl.full([], 0, tl.int64) + index


@triton.jit
def add_both(a_1, a_2, b_1, b_2):
    return a_1 + b_1, a_2 + b_2


@triton.jit
def normalized(x, near, inside, norm, W: tl.constexpr):
    """Returns the layer norm of the W elements of x that are `inside`, zeros for the others. norm: loaded `Norm`.

    Mean and variance come from one pass over the distances from `near`, a number not far from the mean: the squares of x
    itself would cancel.
    """
    distance = tl.where(inside, x - near, 0.0)
    sum_1, sum_2 = tl.reduce((distance, distance * distance), 0, add_both)
    mean = sum_1 / W
    inverse = 1 / tl.sqrt(tl.maximum(sum_2 / W - mean * mean, 0.0) + EPSILON)
    return tl.where(inside, (distance - mean) * inverse * norm.scale + norm.shift, 0.0)


@triton.jit
def embedded(column, inside, position, byte, embedding, NETWORK: tl.constexpr):
    """Returns columns of the embedding (`Embedding`) at a position that follows `byte`."""
    W: tl.constexpr = NETWORK.width
    x = tl.load(embedding.tokens + byte * W + column, inside, 0.0)
    for coordinate in tl.static_range(NETWORK.coordinates):
        first, stride, size = (
            tl.load(embedding.coordinates + coordinate * 3),
            tl.load(embedding.coordinates + coordinate * 3 + 1),
            tl.load(embedding.coordinates + coordinate * 3 + 2),
        )
        x += tl.load(embedding.positions + wide(first + position // stride % size) * W + column, inside, 0.0)
    return x


@triton.jit
def mixed(x):
    x = x + FIRST_MIX
    x = (x ^ (x >> 30)) * SECOND_MIX
    x = (x ^ (x >> 27)) * THIRD_MIX
    return x ^ (x >> 31)


@triton.jit
def choose(logit, state, position, temperature, top_k, top_p, FILTERED: tl.constexpr):
    """Returns the next byte for logits [BYTES], the same as `sampler.py` chooses. state: the stream's random state."""
    byte = tl.arange(0, BYTES)
    logit = logit.to(tl.float64) / temperature
    likely = tl.exp(logit - tl.max(logit, 0))
    likely = likely / tl.sum(likely, 0)
    if FILTERED:
        # [a, b]: whether byte a is likelier than b, or as likely and smaller.
        ahead = (likely[:, None] > likely[None, :]) | (
            (likely[:, None] == likely[None, :]) & (byte[:, None] < byte[None, :])
        )
        rank = tl.sum(ahead.to(tl.int32), 0)
        likely = tl.where(rank < top_k, likely, 0.0)
        before = tl.sum(tl.where(ahead, likely[:, None], 0.0), 0)
        likely = tl.where(before < top_p * tl.sum(likely, 0), likely, 0.0)
    sums = tl.cumsum(likely, 0)
    uniform = (mixed(state.to(tl.uint64) + wide(position).to(tl.uint64)) >> UNUSED_BITS).to(tl.float64) * UNIT
    return tl.sum((sums <= uniform * tl.max(sums, 0)).to(tl.int32), 0)
