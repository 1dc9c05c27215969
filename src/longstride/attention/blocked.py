"""Tiled attention in plain PyTorch, in time proportional to pairs(n): for CPUs, and wherever there is no Triton.

Forward passes over the tiles of `tiles.arrange` with an online softmax: for every query it keeps the running maximum of the
scores, the running sum of the weights and the accumulator, the weighted sum of the values. Backward recomputes a tile's
weights from the first two. Both work head by head and a few tiles at a time, so temporary memory does not grow with
pairs(n), and on a CPU most of it stays in the cache.

Matrix products run over all pairs of a tile. A masked pair adds 0, unless it adds 0 * NaN or 0 * inf. So each head is first
computed as if all inputs were finite; if the result is not finite, once more with masked pairs excluded from the products.

Half precision is computed in float32 and rounded once at the end. Both directions are custom ops, so a compiled graph
contains each as one node, for any length.

Shapes: a head is q, k [batch, n, d_qk] and v [batch, n, d_v]; lanes of it are [lanes, length, d], where lanes includes the
batch; tiles of those [tiles, rows, d] for queries and [tiles, columns, d] for keys, and their scores [tiles, rows, columns].
"""

from collections.abc import Iterator, Sequence
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from longstride.attention.chunks import Chunk, Scratch, budget, lane_groups, tile_chunks
from longstride.attention.gradient import define_ops
from longstride.attention.layout import layout_documents
from longstride.attention.precision import without_autocast
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)
Place = tuple[slice, int, slice]
"""Some rows of a head: an index into [batch, heads, n]."""


def attend_blocked(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float, documents: Sequence[int], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, tile by tile."""
    output, stats = torch.ops.longstride.blocked_forward.default(q, k, v, notation.write(heads), scale, documents)
    return (output, _lse(stats)) if return_lse else output


def _lse(stats: Tensor) -> Tensor:
    """The natural log-sum-exp of each query's scores. Its gradient reaches `fill_gradients` as that of the maximum."""
    row_max, row_sum = stats.unbind(1)
    nothing = row_max == torch.finfo(row_max.dtype).min
    return (row_max + row_sum.detach().log()).masked_fill(nothing, -torch.inf)


def blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output and, as stats [batch, 2, heads, n], each query's largest score and its sum of exp(score - largest).

    The two are not combined into an lse, which would add a rounding error to every weight in backward.
    """
    output, stats = _forward_like(q, k, v, patterns, scale, documents)
    all_row_max, all_row_sum = stats.unbind(1)
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, place, kv_place, offset, _ in _heads(q, k, patterns, documents):
            rows = _load_head(q, place, offset), _load_head(k, kv_place), _load_head(v, kv_place)
            result = output[place]
            accumulator = _accumulator(result, offset)
            row_max, row_sum = _forward_head(pattern, offset, scratch, scale, rows, accumulator, exact=False)
            if not _all_finite([accumulator]):
                row_max, row_sum = _forward_head(pattern, offset, scratch, scale, rows, accumulator.zero_(), exact=True)
            _store(accumulator, result, offset)
            all_row_max[place], all_row_sum[place] = row_max[:, offset:].squeeze(-1), row_sum[:, offset:].squeeze(-1)
    return output, stats


def fill_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_stats: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills the gradients of q, k and v that are needed."""
    (dq, *d_keys), (q, k, v), (output, stats) = gradients, inputs, saved
    row_max, row_sum = stats.unbind(1)
    sums = d_keys
    if q.shape[1] > k.shape[1] and q.dtype != _working_dtype(q):  # Sums over heads that share keys are rounded once.
        sums = [torch.empty_like(x, dtype=_working_dtype(x)) for x in d_keys]
    if documents and q.shape[2] < k.shape[2]:
        for x in sums:
            x.zero_()  # Documents before the first query.
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, place, kv_place, offset, first in _heads(q, k, patterns, documents):
            rows = _load_head(q, place, offset), _load_head(k, kv_place), _load_head(v, kv_place)
            d_rows = _load_head(d_output, place, offset)
            # delta, the row sums of dO * O: d_scores = weights * (dO V^T - delta). The derivative of the lse by a score is
            # the weight, so the gradient of the lse is subtracted from delta.
            delta = (d_rows * _load_head(output, place, offset)).sum(-1, keepdim=True)
            if d_stats is not None:
                delta[:, offset:] -= d_stats[:, 0][place].unsqueeze(-1)
            log2_scale = row_sum[place].log2().neg_()
            row_stats = d_rows, delta, *(_padded(x.unsqueeze(-1), offset) for x in (row_max[place], log2_scale))
            places = zip((dq, *sums), (place, kv_place, kv_place), needed)
            results = [x[where] if wanted else None for x, where, wanted in places]
            rules = (offset, True), (0, first), (0, first)
            totals = [None if x is None else _accumulator(x, *rule) for x, rule in zip(results, rules)]
            _backward_head(pattern, offset, scratch, scale, rows, row_stats, totals, exact=False)
            found = [total for total in totals if total is not None]
            if not _all_finite(found):
                for x in found:
                    x.zero_()
                _backward_head(pattern, offset, scratch, scale, rows, row_stats, totals, exact=True)
            for result, total, rule in zip(results, totals, rules):
                if result is not None and total is not None:
                    _store(total, result, *rule)
    for x, total in zip(d_keys, sums):
        if total is not x:
            x.copy_(total)


def _forward_head(
    pattern: Pattern, offset: int, scratch: Scratch, scale: float, inputs: Sequence[Tensor], accumulator: Tensor, exact: bool
) -> tuple[Tensor, Tensor]:
    """Fills `accumulator`, initially 0, with a head's output; returns every query's largest score and sum of weights."""
    q, k, v = inputs
    row_sum = torch.zeros_like(accumulator[..., :1])
    row_max = torch.full_like(row_sum, torch.finfo(row_sum.dtype).min)
    for lanes in lane_groups(pattern, q, offset):
        arranged = lanes.load_queries(q), lanes.load_keys(k), lanes.load_keys(v)
        states = [lanes.load_queries(state) for state in (row_max, row_sum, accumulator)]
        for chunk in tile_chunks(lanes, arranged[0], exact):
            _forward_chunk(chunk, scratch, scale, arranged, states)
        for state, total in zip(states, (row_max, row_sum, accumulator)):
            lanes.store_queries(state, total)
    row_sum.masked_fill_(row_sum == 0, 1)  # Avoids 0 / 0 for a query that sees no key.
    accumulator.div_(row_sum)
    return row_max, row_sum


def _backward_head(
    pattern: Pattern, offset: int, scratch: Scratch, scale: float, inputs: Sequence[Tensor], row_stats: Sequence[Tensor],
    totals: Sequence[Tensor | None], exact: bool,
) -> None:  # fmt: skip
    """Adds a head's gradients to `totals`; those that are not needed are None."""
    for lanes in lane_groups(pattern, inputs[0], offset):
        loads = lanes.load_queries, lanes.load_keys, lanes.load_keys
        stores = lanes.store_queries, lanes.store_keys, lanes.store_keys
        arranged = [load(x) for load, x in zip(loads, inputs)]
        sums = [None if x is None else load(x) for load, x in zip(loads, totals)]
        stats = [lanes.load_queries(x) for x in row_stats]
        for chunk in tile_chunks(lanes, arranged[0], exact):
            _backward_chunk(chunk, scratch, scale, arranged, stats, sums)
        for store, part, total in zip(stores, sums, totals):
            if part is not None and total is not None:
                store(part, total)


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether these results have no NaN or infinity, so that none came from a masked pair either.

    Tests the sums, which is faster than testing every element. A sum that overflows costs time, not correctness.
    """
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return False  # A CUDA graph cannot synchronize.
    return all(bool(x.sum().isfinite()) for x in tensors)


def _exp(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """exp(x) * 2 ** bits, in place.

    Not torch.exp: on a CPU that takes five times as long where the result is 0, as it is at masked pairs.
    """
    return (x.mul_(LOG2_E) if bits is None else torch.add(bits, x, alpha=LOG2_E, out=x)).exp2_()


def _forward_chunk(
    chunk: Chunk, scratch: Scratch, scale: float, inputs: Sequence[Tensor], states: Sequence[Tensor]
) -> None:  # fmt: skip
    """Adds the keys of a chunk to the running maximum, the running sum and the accumulator of its queries."""
    (q, k, v), (row_max, row_sum, accumulator) = inputs, states
    scores = chunk.scores(chunk.queries(q), chunk.keys(k), scale, scratch)
    running_max = chunk.query_windows(row_max)
    new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True).view(running_max.shape))
    weights = _exp(scores.sub_(new_max.flatten(0, 1)))
    sums = weights.sum(-1, keepdim=True).view(new_max.shape)
    running_sum, accumulator_rows = chunk.query_windows(row_sum), chunk.query_windows(accumulator)
    if not chunk.tiles.fresh:
        rescale = _exp(running_max - new_max)
        accumulator_rows.mul_(rescale)
        sums.addcmul_(running_sum, rescale)
    running_max.copy_(new_max)
    running_sum.copy_(sums)
    scratch.add_product(accumulator_rows, weights, chunk.keys(v), 1, chunk.tiles.fresh, chunk.seen)


def _backward_chunk(
    chunk: Chunk, scratch: Scratch, scale: float, inputs: Sequence[Tensor], row_stats: Sequence[Tensor],
    sums: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Adds what the pairs of a chunk contribute to the gradients of its queries, keys and values."""
    (q, k, v), (d_output, delta, row_max, log2_scale), (dq, dk, dv) = inputs, row_stats, sums
    queries, keys, d_output_rows = chunk.queries(q), chunk.keys(k), chunk.queries(d_output)
    scores = chunk.scores(queries, keys, scale, scratch)
    weights = chunk.zero_masked(_exp(scores.sub_(chunk.queries(row_max)), chunk.queries(log2_scale)))
    if dv is not None:
        chunk.add_to_keys(dv, weights.transpose(1, 2), d_output_rows, 1, scratch)
    if dq is None and dk is None:
        return
    d_scores = scratch.product("d_scores", d_output_rows, chunk.keys(v).transpose(1, 2))
    d_scores = chunk.zero_masked(d_scores.sub_(chunk.queries(delta)).mul_(weights))
    if dq is not None:
        scratch.add_product(chunk.query_windows(dq), d_scores, keys, scale, chunk.tiles.fresh, chunk.seen)
    if dk is not None:
        chunk.add_to_keys(dk, d_scores.transpose(1, 2), queries, scale, scratch)


def _heads(
    q: Tensor, k: Tensor, patterns: str, documents: Sequence[int]
) -> Iterator[tuple[Pattern, Place, Place, int, bool]]:  # fmt: skip
    """Yields, for the heads of each document with queries: the pattern, the places of the queries and of their keys, the
    position of the first query among the keys, and whether the head is the first with these keys.

    As many sequences at a time as fit the budget.
    """
    group = q.shape[1] // k.shape[1]
    for part in layout_documents(q.shape, k.shape, documents):
        if part.queries.start == part.queries.stop:
            continue
        at_once = max(1, budget(q.device).positions // part.n)
        for head, pattern in enumerate(notation.parse_heads(patterns, q.shape[1])):
            for start in range(part.batch.start, part.batch.stop, at_once):
                batch = slice(start, min(start + at_once, part.batch.stop))
                places = (batch, head, part.queries), (batch, head // group, part.keys)
                yield pattern, *places, part.offset, head % group == 0


def _load_head(x: Tensor, place: Place, offset: int = 0) -> Tensor:
    """Returns rows of a head in the working dtype: [batch, offset + n, d], contiguous; the first `offset` rows are 0."""
    return _padded(x[place].to(_working_dtype(x)).contiguous(), offset)


def _padded(rows: Tensor, offset: int) -> Tensor:
    return pad(rows, (0, 0, offset, 0)) if offset else rows


def _accumulator(result: Tensor, offset: int, first: bool = True) -> Tensor:
    """Returns zeros for rows of a head, [batch, offset + n, d]: the result itself, or a copy if that is half precision.

    A copy also if there are rows before `offset`, or if the result has sums of other heads already: it is not the first.
    """
    if first and not offset and result.dtype == _working_dtype(result):
        return result.zero_()
    batch, n, d = result.shape
    return result.new_zeros((batch, offset + n, d), dtype=_working_dtype(result))


def _store(total: Tensor, result: Tensor, offset: int, first: bool = True) -> None:
    if not first:
        result += total
    elif total is not result:
        result.copy_(total[:, offset:])


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, n, _ = q.shape
    return q.new_empty((batch, heads, n, v.shape[3])), q.new_empty((batch, 2, heads, n), dtype=_working_dtype(q))


define_ops("blocked", blocked_forward, _forward_like, fill_gradients, lambda x: x.new_empty(x.shape))
