"""Tiled attention in plain PyTorch, in time proportional to pairs(n): for CPUs, and wherever there is no Triton.

Forward passes over the tiles of `tiles.plan` with an online softmax: for every query it keeps the running maximum of the
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
from longstride.attention.layout import fill_in_float32, layout_documents
from longstride.attention.precision import without_autocast
from longstride.attention.tiles import plan
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)
Head = tuple[slice, int]
"""An index into [batch, heads]."""


def attend_blocked(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, tile by tile."""
    return torch.ops.longstride.blocked_forward.default(q, k, v, notation.write(heads), scale)[0]  # type: ignore[no-any-return]


def blocked_forward(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and, for every query, the maximum of its scores and the sum of exp(score - maximum).

    The last two are not combined into an lse, which would add a rounding error to every weight in backward.
    """
    results = _forward_like(q, k, v, patterns, scale)
    _fill_results(results, (q, k, v), patterns, scale)
    return results


def _fill_results(results: Sequence[Tensor], inputs: Sequence[Tensor], patterns: str, scale: float) -> None:
    (output, all_row_max, all_row_sum), (q, k, v) = results, inputs
    offset = k.shape[2] - q.shape[2]
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, head, kv_head, _ in _heads(q, k, patterns):
            rows = _load_head(q, head, offset), _load_head(k, kv_head), _load_head(v, kv_head)
            accumulator = _head_accumulator(output, head, offset)
            row_max, row_sum = _forward_head(pattern, offset, scratch, scale, rows, accumulator, exact=False)
            if not _all_finite([accumulator]):
                row_max, row_sum = _forward_head(pattern, offset, scratch, scale, rows, accumulator.zero_(), exact=True)
            _store_head(accumulator, output, head, offset)
            all_row_max[head], all_row_sum[head] = row_max[:, offset:].squeeze(-1), row_sum[:, offset:].squeeze(-1)


def fill_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, inputs: Sequence[Tensor], saved: Sequence[Tensor], patterns: str,
    scale: float, needed: Sequence[bool], d_lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the gradients of q, k and v that are needed."""
    (q, k, v), (output, row_max, row_sum) = inputs, saved
    offset = k.shape[2] - q.shape[2]
    scratch = Scratch(_working_dtype(q), q.device)
    with without_autocast(q.device):
        for pattern, head, kv_head, first in _heads(q, k, patterns):
            rows = _load_head(q, head, offset), _load_head(k, kv_head), _load_head(v, kv_head)
            d_rows = _load_head(d_output, head, offset)
            # delta, the row sums of dO * O: d_scores = weights * (dO V^T - delta). The lse's own slope is the weight.
            delta = (d_rows * _load_head(output, head, offset)).sum(-1, keepdim=True)
            if d_lse is not None:
                delta[:, offset:] -= d_lse[head].unsqueeze(-1)
            stats = [_padded(x.unsqueeze(-1), offset) for x in (row_max[head], row_sum[head].log2().neg_())]
            places = (head, offset, True), (kv_head, 0, first), (kv_head, 0, first)
            totals = [
                _head_accumulator(x, *place) if wanted else None for x, place, wanted in zip(gradients, places, needed)
            ]
            row_stats = d_rows, delta, *stats
            _backward_head(pattern, offset, scratch, scale, rows, row_stats, totals, exact=False)
            sums = [total for total in totals if total is not None]
            if not _all_finite(sums):
                for x in sums:
                    x.zero_()
                _backward_head(pattern, offset, scratch, scale, rows, row_stats, totals, exact=True)
            for gradient, total, place in zip(gradients, totals, places):
                if total is not None:
                    _store_head(total, gradient, *place)


def _forward_head(
    pattern: Pattern, offset: int, scratch: Scratch, scale: float, inputs: Sequence[Tensor], accumulator: Tensor, exact: bool
) -> tuple[Tensor, Tensor]:
    """Fills `accumulator`, initially 0, with a head's output; returns every query's largest score and sum of weights."""
    q, k, v = inputs
    row_sum = torch.zeros_like(accumulator[..., :1])
    row_max = torch.full_like(row_sum, torch.finfo(row_sum.dtype).min)
    for arrangement in plan(pattern, q.shape[1], offset):
        for lanes in lane_groups(arrangement, q):
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
    for arrangement in plan(pattern, inputs[0].shape[1], offset):
        for lanes in lane_groups(arrangement, inputs[0]):
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


def _heads(q: Tensor, k: Tensor, patterns: str) -> Iterator[tuple[Pattern, Head, Head, bool]]:
    """Yields each head's pattern, its place and that of its keys, and whether it is the first with these keys.

    As many sequences at a time as fit the budget.
    """
    at_once = max(1, budget(q.device).positions // k.shape[2])
    group = q.shape[1] // k.shape[1]
    for head, pattern in enumerate(notation.parse_heads(patterns, q.shape[1])):
        for first in range(0, len(q), at_once):
            batch = slice(first, first + at_once)
            yield pattern, (batch, head), (batch, head // group), head % group == 0


def _load_head(x: Tensor, head: Head, offset: int = 0) -> Tensor:
    """Returns one head in the working dtype: [batch, heads, n, d] -> [batch, offset + n, d], contiguous, first rows of 0."""
    return _padded(x[head].to(_working_dtype(x)).contiguous(), offset)


def _padded(rows: Tensor, offset: int) -> Tensor:
    return pad(rows, (0, 0, offset, 0)) if offset else rows


def _head_accumulator(result: Tensor, head: Head, offset: int = 0, first: bool = True) -> Tensor:
    """Returns zeros for one head, [batch, offset + n, d]: a view of the result, or a copy if that is half precision.

    A copy also if there are rows before `offset`, or if the result has sums of other heads already: it is not the first.
    """
    place = result[head]
    if first and not offset and place.dtype == _working_dtype(place):
        return place.zero_()
    batch, n, d = place.shape
    return place.new_zeros((batch, offset + n, d), dtype=_working_dtype(place))


def _store_head(total: Tensor, result: Tensor, head: Head, offset: int = 0, first: bool = True) -> None:
    place = result[head]
    if not first:
        place += total
    elif total.data_ptr() != place.data_ptr():
        place.copy_(total[:, offset:])


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward_like(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    row_stats = q.new_empty(q.shape[:-1], dtype=_working_dtype(v))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), row_stats, torch.empty_like(row_stats)


def _gradient_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def blocked_layout_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the output, the lse, and the row stats of `blocked_forward`."""
    output, lse, row_max, row_sum = _layout_like(q, k, v, patterns, scale, documents)
    for part in layout_documents(q.shape, k.shape, documents):
        results = [x[part.batch, :, part.queries] for x in (output, row_max, row_sum)]
        if results[0].numel():
            keys = part.batch, slice(None), part.keys
            _fill_results(results, (q[part.batch, :, part.queries], k[keys], v[keys]), patterns, scale)
    nothing = row_max == torch.finfo(row_max.dtype).min
    torch.add(row_max, row_sum.log(), out=lse).masked_fill_(nothing, -torch.inf)
    return output, lse, row_max, row_sum


def _layout_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    output, row_max, row_sum = _forward_like(q, k, v, patterns, scale)
    return output, torch.empty_like(row_max), row_max, row_sum


def fill_layout_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    q, k, _ = inputs
    for part in layout_documents(q.shape, k.shape, documents):
        queries, keys = (part.batch, slice(None), part.queries), (part.batch, slice(None), part.keys)
        places = queries, keys, keys
        results = [x[place] if wanted else x for x, place, wanted in zip(gradients, places, needed)]
        if part.queries.start == part.queries.stop:
            for x, wanted in zip(results, needed):
                if wanted:
                    x.zero_()
            continue
        fill_gradients(
            results, d_output[queries], [x[place] for x, place in zip(inputs, places)], [x[queries] for x in saved],
            patterns, scale, needed, None if d_lse is None else d_lse[queries],
        )  # fmt: skip


ROW_STATS = ["row_max", "row_sum"]
define_ops("blocked", blocked_forward, _forward_like, fill_gradients, _gradient_like, ROW_STATS)
define_ops(
    "blocked", blocked_layout_forward, _layout_like, fill_in_float32(fill_layout_gradients), _gradient_like, ROW_STATS,
    layout=True,
)  # fmt: skip
