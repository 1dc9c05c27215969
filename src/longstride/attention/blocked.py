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

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longstride.attention.chunks import Chunk, Scratch, budget, lane_groups, tile_chunks
from longstride.attention.few_queries import are_few, attend_to_seen
from longstride.attention.gradient import define_ops
from longstride.attention.precision import without_autocast
from longstride.attention.sequences import Rows, Sequences, is_capturing, sequences, working_dtype
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)


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
    row_max, row_sum = stats.unbind(1)
    heads, group = notation.parse_heads(patterns, q.shape[1]), q.shape[1] // k.shape[1]
    scratch = Scratch(working_dtype(q), q.device)

    def compute(some: Sequences, head: int, exact: bool = False) -> None:
        inputs = _padded(some.queries.load(q, head), some.offset), *(some.keys.load(x, head // group) for x in (k, v))
        result, *others = (Result(x, some.queries, head, some.offset) for x in (output, row_max, row_sum))
        total = result.accumulator()
        found = _forward_head(heads[head], some.offset, scratch, scale, inputs, total, exact)
        stats_of_rows = list(zip((x.squeeze(-1) for x in found), others))
        _finish(compute, some, head, exact, [(total, result)], stats_of_rows)

    with without_autocast(q.device):
        for some in sequences(q.shape, k.shape, documents, budget(q.device).positions, q.device):
            if are_few(some, q.device):
                for total, x in zip(attend_to_seen(q, k, v, heads, some, scale), (output, row_max, row_sum)):
                    x[some.queries.batch, :, some.queries.rows] = total
            else:
                for head in range(len(heads)):
                    compute(some, head)
    return output, stats


def fill_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_stats: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills the gradients of q, k and v that are needed."""
    (dq, *d_keys), (q, k, v), (output, stats) = gradients, inputs, saved
    row_max, row_sum = stats.unbind(1)
    heads, group = notation.parse_heads(patterns, q.shape[1]), q.shape[1] // k.shape[1]
    sums = d_keys
    if group > 1 and q.dtype != working_dtype(q):  # Sums over heads that share keys are rounded once.
        sums = [torch.empty_like(x, dtype=working_dtype(x)) for x in d_keys]
    if documents and q.shape[2] < k.shape[2]:
        for x in sums:
            x.zero_()  # Documents before the first query.
    scratch = Scratch(working_dtype(q), q.device)

    def compute(some: Sequences, head: int, exact: bool = False) -> None:
        queries, keys, offset, kv_head = some.queries, some.keys, some.offset, head // group
        rows = _padded(queries.load(q, head), offset), keys.load(k, kv_head), keys.load(v, kv_head)
        d_rows, output_rows = queries.load(d_output, head), queries.load(output, head)
        # A row of padding weighs 0.
        largest = queries.load(row_max, head, padding=torch.finfo(output_rows.dtype).max)
        weight = queries.load(row_sum, head, padding=1)
        if are_few(some, q.device):
            # Forward had other products. Where scores are large, their rounding errors would change weights a lot.
            again = output_rows.new_zeros((len(output_rows), some.n, output_rows.shape[2]))
            stats_again = _forward_head(heads[head], offset, scratch, scale, rows, again, exact)
            output_rows, largest, weight = (x[:, offset:] for x in (again, *(x.squeeze(-1) for x in stats_again)))
        # delta, the row sums of dO * O: d_scores = weights * (dO V^T - delta). The derivative of the lse by a score is
        # the weight, so the gradient of the lse is subtracted from delta.
        delta = (d_rows * output_rows).sum(-1)
        if d_stats is not None:
            delta -= queries.load(d_stats[:, 0], head)
        log2_scale = weight.log2().neg_()
        row_stats = [_padded(x, offset) for x in (d_rows, *(x.unsqueeze(-1) for x in (delta, largest, log2_scale)))]
        first = head % group == 0
        results = Result(dq, queries, head, offset), *(Result(x, keys, kv_head, 0, first) for x in sums)
        totals = [result.accumulator() if wanted else None for result, wanted in zip(results, needed)]
        _backward_head(heads[head], offset, scratch, scale, rows, row_stats, totals, exact)
        found = [(total, result) for total, result in zip(totals, results) if total is not None]
        _finish(compute, some, head, exact, found)

    with without_autocast(q.device):
        for some in sequences(q.shape, k.shape, documents, budget(q.device).positions, q.device):
            for head in range(len(heads)):
                compute(some, head)
    for x, total in zip(d_keys, sums):
        if total is not x:
            x.copy_(total)


class Result(NamedTuple):
    """Where sums over some sequences of a head are written."""

    tensor: Tensor
    rows: Rows
    head: int
    offset: int
    """Rows of the sums before those of the tensor."""
    first: bool = True
    """Whether the tensor has no sums of other heads yet."""

    def accumulator(self) -> Tensor:
        """Returns zeros for the sums, [sequences, offset + n, d]: the result itself if it can be summed up in place."""
        x = self.tensor[self.rows.batch, self.head, self.rows.rows]
        if self.rows.is_view and self.first and not self.offset and x.dtype == working_dtype(x):
            return x.zero_()
        sequences, n, d = x.shape
        return x.new_zeros((sequences, self.offset + n, d), dtype=working_dtype(x))

    def store(self, total: Tensor) -> None:
        if total.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr():
            return
        value = total[:, self.offset :]
        self.rows.store(value if self.first else value + self.rows.load(self.tensor, self.head), self.tensor, self.head)


def _finish(
    compute: Callable[..., None], some: Sequences, head: int, exact: bool, sums: Sequence[tuple[Tensor, Result]],
    others: Sequence[tuple[Tensor, Result]] = (),
) -> None:  # fmt: skip
    """Stores the results; or computes them again with masked pairs excluded, if the sums are not finite.

    Documents that are computed together are so again: the same products leave every bit of those that are finite.
    """
    if exact or _all_finite([total for total, _ in sums]):
        for total, result in (*sums, *others):
            result.store(total)
    else:
        compute(some, head, exact=True)


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
    return not is_capturing(tensors[0].device) and all(bool(x.sum().isfinite()) for x in tensors)


def _exp(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """exp(x) * 2 ** bits, in place.

    Not torch.exp: on a CPU that takes five times as long where the result is 0, as it is at masked pairs.
    """
    return (x.mul_(LOG2_E) if bits is None else torch.add(bits, x, alpha=LOG2_E, out=x)).exp2_()


def _forward_chunk(chunk: Chunk, scratch: Scratch, scale: float, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
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
    largest = chunk.queries(row_max)
    weights = chunk.zero_masked(_exp(scores.sub_(largest), chunk.queries(log2_scale)), largest)
    if dv is not None:
        chunk.add_to_keys(dv, weights.transpose(1, 2), d_output_rows, 1, scratch)
    if dq is None and dk is None:
        return
    d_scores = scratch.product("d_scores", d_output_rows, chunk.keys(v).transpose(1, 2))
    d_scores = chunk.zero_masked(d_scores.sub_(chunk.queries(delta)).mul_(weights), largest)
    if dq is not None:
        scratch.add_product(chunk.query_windows(dq), d_scores, keys, scale, chunk.tiles.fresh, chunk.seen)
    if dk is not None:
        chunk.add_to_keys(dk, d_scores.transpose(1, 2), queries, scale, scratch)


def _padded(rows: Tensor, offset: int) -> Tensor:
    """[sequences, n, d] after so many rows of 0."""
    return pad(rows, (0, 0, offset, 0)) if offset else rows


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, n, _ = q.shape
    return q.new_empty((batch, heads, n, v.shape[3])), q.new_empty((batch, 2, heads, n), dtype=working_dtype(q))


define_ops("blocked", blocked_forward, _forward_like, fill_gradients, lambda x: x.new_empty(x.shape))
