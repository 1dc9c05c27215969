"""The oracle's sums in time and memory that follow pairs(n), with plain PyTorch: for CPUs, and wherever Triton is not.

Forward keeps, for every query, the largest score so far, the sum of the weights and the weighted sum of the values, and
passes over the tiles of `tiles.plan`. Backward computes a tile's weights again from the first two of these. It goes head by
head and a few tiles at a time, so what is in memory besides inputs and results does not even grow with pairs(n), and on a
CPU most of it stays in the cache.

Products pass over all pairs of a tile, and one that does not count adds 0: unless it adds 0 * NaN or 0 * inf. Each head is
computed as if all were finite, and where its result is not, once more with pairs that do not count left out of products.

Half precision is computed in float32 and rounded once at the end. Both directions are custom ops, so that a compiled graph
holds each as one node, whatever the length.

Shapes: a head is q, k [batch, n, d_qk] and v [batch, n, d_v]; lanes of it are [lanes, length, d], where lanes includes the
batch; tiles of those [tiles, rows, d] for queries and [tiles, columns, d] for keys, and their scores [tiles, rows, columns].
"""

from collections.abc import Iterator, Sequence
from math import log

import torch
from torch import Tensor

from longstride.attention.chunks import Chunk, Scratch, budget, lane_groups
from longstride.attention.flops import count_flops
from longstride.attention.gradient import join
from longstride.attention.precision import without_autocast
from longstride.attention.tiles import plan
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)


def attend_blocked(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, tile by tile."""
    return blocked_forward(q, k, v, notation.write(heads), scale)[0]  # type: ignore[no-any-return]


@torch.library.custom_op("longstride::blocked_forward", mutates_args=())
def blocked_forward(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and of every query the largest score and the sum of its weights relative to that.

    The two are kept apart, since taking their log-sum-exp would add a rounding to every weight in backward.
    """
    output, all_largest, all_weight = _forward_like(q, k, v, patterns, scale)
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, head in _head_by_head(q, patterns):
            inputs = _take(q, head), _take(k, head), _take(v, head)
            weighted = _zeros(output, head)
            largest, weight = _forward_head(pattern, scratch, scale, inputs, weighted, exact=False)
            if not _all_finite([weighted]):
                largest, weight = _forward_head(pattern, scratch, scale, inputs, weighted.zero_(), exact=True)
            _put(weighted, output, head)
            all_largest[head], all_weight[head] = largest.squeeze(-1), weight.squeeze(-1)
    return output, all_largest, all_weight


@torch.library.custom_op("longstride::blocked_backward", mutates_args=())
def blocked_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    largest: Tensor,
    weight: Tensor,
    patterns: str,
    scale: float,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; one that is not needed is left empty."""
    results: tuple[Tensor, Tensor, Tensor] = _backward_like(
        gradient, q, k, v, output, largest, weight, patterns, scale, needed
    )
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, head in _head_by_head(q, patterns):
            inputs = _take(q, head), _take(k, head), _take(v, head)
            slopes = _take(gradient, head)
            # A query's weights sum to 1, so the slopes of its scores lose their mean, which is this product.
            mean = (slopes * _take(output, head)).sum(-1, keepdim=True)
            by_query = slopes, mean, largest[head].unsqueeze(-1), weight[head].unsqueeze(-1).log2().neg_()
            totals = [_zeros(x, head) if wanted else None for x, wanted in zip(results, needed)]
            _backward_head(pattern, scratch, scale, inputs, by_query, totals, exact=False)
            sums = [total for total in totals if total is not None]
            if not _all_finite(sums):
                for x in sums:
                    x.zero_()
                _backward_head(pattern, scratch, scale, inputs, by_query, totals, exact=True)
            for result, total in zip(results, totals):
                if total is not None:
                    _put(total, result, head)
    return results


def _forward_head(
    pattern: Pattern, scratch: Scratch, scale: float, inputs: Sequence[Tensor], weighted: Tensor, exact: bool
) -> tuple[Tensor, Tensor]:
    """Fills `weighted`, zeros so far, with a head's output; returns every query's largest score and sum of weights."""
    q, k, v = inputs
    weight = torch.zeros_like(weighted[..., :1])
    largest = torch.full_like(weight, torch.finfo(weight.dtype).min)
    for arrangement in plan(pattern, q.shape[1]):
        for lanes in lane_groups(arrangement, q):
            arranged = lanes.load_queries(q), lanes.load_keys(k), lanes.load_keys(v)
            states = [lanes.load_queries(state) for state in (largest, weight, weighted)]
            for chunk in lanes.chunks(exact):
                _forward_chunk(chunk, scratch, scale, *arranged, *states)
            for state, total in zip(states, (largest, weight, weighted)):
                lanes.store_queries(state, total)
    weight.masked_fill_(weight == 0, 1)  # A query that sees no key: 0 / 1.
    weighted.div_(weight)
    return largest, weight


def _backward_head(
    pattern: Pattern,
    scratch: Scratch,
    scale: float,
    inputs: Sequence[Tensor],
    by_query: Sequence[Tensor],
    totals: Sequence[Tensor | None],
    exact: bool,
) -> None:
    """Adds a head's gradients to `totals`, of which those that are not needed are None."""
    for arrangement in plan(pattern, inputs[0].shape[1]):
        for lanes in lane_groups(arrangement, inputs[0]):
            loads = lanes.load_queries, lanes.load_keys, lanes.load_keys
            stores = lanes.store_queries, lanes.store_keys, lanes.store_keys
            arranged = [load(x) for load, x in zip(loads, inputs)]
            sums = [None if x is None else load(x) for load, x in zip(loads, totals)]
            arranged += [lanes.load_queries(x) for x in by_query]
            for chunk in lanes.chunks(exact):
                _backward_chunk(chunk, scratch, scale, *arranged, *sums)
            for store, part, total in zip(stores, sums, totals):
                if part is not None and total is not None:
                    store(part, total)


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no NaN or inf is in these results; then none has come from a pair that does not count, either.

    By sums, which are faster than a look at each number. A sum that overflows costs time, not correctness.
    """
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return False  # A graph cannot wait for the answer.
    return all(bool(x.sum().isfinite()) for x in tensors)


def _exp(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """exp(x) * 2 ** bits, in place.

    Not torch.exp: on a CPU that takes five times as long where the result is 0, as it is at pairs that do not count.
    """
    return (x.mul_(LOG2_E) if bits is None else torch.add(bits, x, alpha=LOG2_E, out=x)).exp2_()


def _forward_chunk(
    chunk: Chunk,
    scratch: Scratch,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    largest: Tensor,
    weight: Tensor,
    weighted: Tensor,
) -> None:
    scores = chunk.scores(chunk.queries(q), chunk.keys(k), scale, scratch)
    before = chunk.query_windows(largest)
    now = torch.maximum(before, scores.amax(-1, keepdim=True).view(before.shape))
    weights = _exp(scores.sub_(now.flatten(0, 1)))
    sums = weights.sum(-1, keepdim=True).view(now.shape)
    weight_so_far, weighted_so_far = chunk.query_windows(weight), chunk.query_windows(weighted)
    if not chunk.tiles.fresh:
        kept = _exp(before - now)
        weighted_so_far.mul_(kept)
        sums.addcmul_(weight_so_far, kept)
    before.copy_(now)
    weight_so_far.copy_(sums)
    scratch.add_product(weighted_so_far, weights, chunk.keys(v), 1, chunk.tiles.fresh, chunk.seen)


def _backward_chunk(
    chunk: Chunk,
    scratch: Scratch,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    mean: Tensor,
    largest: Tensor,
    shrink: Tensor,
    q_sum: Tensor | None,
    k_sum: Tensor | None,
    v_sum: Tensor | None,
) -> None:
    queries, keys, output_slopes = chunk.queries(q), chunk.keys(k), chunk.queries(slopes)
    scores = chunk.scores(queries, keys, scale, scratch)
    weights = chunk.hide(_exp(scores.sub_(chunk.queries(largest)), chunk.queries(shrink)))
    if v_sum is not None:
        chunk.add_to_keys(v_sum, weights.transpose(1, 2), output_slopes, 1, scratch)
    if q_sum is None and k_sum is None:
        return
    score_slopes = scratch.product("slopes", output_slopes, chunk.keys(v).transpose(1, 2))
    score_slopes = chunk.hide(score_slopes.sub_(chunk.queries(mean)).mul_(weights))
    if q_sum is not None:
        scratch.add_product(chunk.query_windows(q_sum), score_slopes, keys, scale, chunk.tiles.fresh, chunk.seen)
    if k_sum is not None:
        chunk.add_to_keys(k_sum, score_slopes.transpose(1, 2), queries, scale, scratch)


def _head_by_head(q: Tensor, patterns: str) -> Iterator[tuple[Pattern, tuple[slice, int]]]:
    """Each head's pattern and the index of the head, for as much of the batch at a time as the budget has."""
    at_once = max(1, budget(q.device).positions // q.shape[2])
    for head, pattern in enumerate(notation.parse(patterns)):
        for first in range(0, len(q), at_once):
            yield pattern, (slice(first, first + at_once), head)


def _take(x: Tensor, head: tuple[slice, int]) -> Tensor:
    """One head in the dtype to compute in: [batch, heads, n, d] -> [batch, n, d], contiguous."""
    return x[head].to(_working_dtype(x)).contiguous()


def _zeros(result: Tensor, head: tuple[slice, int]) -> Tensor:
    """Where a head of the result is summed up, [batch, n, d]: in its place, unless that is of lower precision."""
    place = result[head]
    return place.zero_() if place.dtype == _working_dtype(place) else torch.zeros_like(place, dtype=_working_dtype(place))


def _put(total: Tensor, result: Tensor, head: tuple[slice, int]) -> None:
    if total.dtype != result.dtype:
        result[head] = total


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@blocked_forward.register_fake
def _forward_like(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    by_query = v.new_empty(v.shape[:-1], dtype=_working_dtype(v))
    return v.new_empty(v.shape), by_query, torch.empty_like(by_query)


@blocked_backward.register_fake
def _backward_like(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    largest: Tensor,
    weight: Tensor,
    patterns: str,
    scale: float,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    like_q, like_k, like_v = (x.new_empty(x.shape if wanted else 0) for x, wanted in zip((q, k, v), needed))
    return like_q, like_k, like_v


join(blocked_forward, blocked_backward, "blocked")
count_flops(torch.ops.longstride.blocked_forward, torch.ops.longstride.blocked_backward)
