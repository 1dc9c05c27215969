"""forward: the output, and the lse (log-sum-exp of the scores, base 2) of every query.

A program owns a tile of queries and passes over the keys that they see (`key_loop.py`) with the online softmax:
`running_max` is the largest score so far, `weight` the sum of 2 ** (score - running_max), `accumulator` the same sum with
the values. Scores are in bits: `scale` includes log2(e).
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl

from longstride.attention.kernels.key_loop import every_key, over_keys, place_keys, sees
from longstride.attention.kernels.primitives import (
    LOWEST,
    PRECISION,
    document_of,
    load,
    query_rows,
    read_tile,
    row_of_query,
    store,
)


@triton.jit
def add_keys(
    sums, query, every, first, end, last, scale,
    DIMS: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums after some tiles of keys. `running_max` begins at LOWEST, not -inf, so that a score of -inf weighs 0."""
    accumulator, weight, running_max = sums
    for start in tl.range(first, end, TILES.columns):
        key, rows = place_keys(every, start, last, TILES, CELLS)
        keys = load(every.k, rows, DIMS.qk, MASKED)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            scores = tl.where(sees(every, key, rows, TILES, CELLS), scores, float("-inf"))
        values = load(every.v, rows, DIMS.v, MASKED)
        new_max = tl.maximum(running_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        weight = weight * shrink + tl.sum(weights, 1)
        accumulator = tl.dot(
            weights.to(values.dtype), values, accumulator * shrink[:, None], input_precision=PRECISION,
            out_dtype=tl.float32,
        )  # fmt: skip
        running_max = new_max
    return accumulator, weight, running_max


@triton.jit
def forward(q, k, v, output, lse, tables, scale, sizes, DIMS: tl.constexpr, TILES: tl.constexpr, ACCUMULATE: tl.constexpr):
    """ACCUMULATE: an earlier pass has computed other keys of the same queries; this one adds to its results."""
    job, tile = read_tile(tables, sizes, TILES.rows, TILES.varied)
    if tile.first < tile.length:
        every_query = document_of(q, tile.batch, job.head, tile.queries)
        every = every_key(k, v, job, tile, tables, TILES)
        results = document_of(output, tile.batch, job.head, tile.queries)
        rows = query_rows(job, tile, TILES.rows, TILES.varied)
        lse_rows = lse + row_of_query(tile.batch, job.head, tile.queries, sizes) + (rows.start + rows.offset)
        query = load(every_query, rows, DIMS.qk)
        if ACCUMULATE:
            earlier = tl.load(lse_rows, mask=rows.valid, other=0.0)
            weight = tl.where(earlier == float("-inf"), 0.0, 1.0)
            running_max = tl.where(earlier == float("-inf"), LOWEST, earlier)
            accumulator = load(results, rows, DIMS.v).to(tl.float32)
        else:
            running_max = tl.full([TILES.rows], LOWEST, tl.float32)
            weight = tl.zeros([TILES.rows], tl.float32)
            accumulator = tl.zeros([TILES.rows, DIMS.v.width], tl.float32)

        accumulator, weight, running_max = over_keys(
            (accumulator, weight, running_max), query, every, scale, DIMS, TILES, add_keys
        )  # fmt: skip

        nothing = weight == 0
        weight = tl.where(nothing, 1.0, weight)
        store(accumulator / weight[:, None], results, rows, DIMS.v, False)
        tl.store(lse_rows, tl.where(nothing, float("-inf"), running_max + tl.log2(weight)), mask=rows.valid)
