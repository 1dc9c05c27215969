"""The oracle's sums in time and memory that follow pairs(n), with plain PyTorch: for CPUs, and wherever Triton is not.

Forward keeps, for every query, the largest score so far, the sum of the weights and the weighted sum of the values, and
passes over the tiles of `tiles.plan`. Backward computes a tile's weights again from the saved log-sum-exp. It goes head by
head and a few tiles at a time, so what is in memory besides inputs and results does not even grow with pairs(n), and on a
CPU most of it stays in the cache.

Half precision is computed in float32 and rounded once at the end. Both directions are custom ops, so that a compiled graph
holds each as one node, whatever the length.

Shapes: a head is q, k [batch, n, d_qk] and v [batch, n, d_v]; lanes of it are [lanes, length, d], where lanes includes the
batch; tiles of those [tiles, rows, d] for queries and [tiles, columns, d] for keys, and their scores [tiles, rows, columns].
"""

from collections.abc import Iterator, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride import notation
from longstride.attention.tiles import Arrangement, Tiles, plan
from longstride.patterns import Pattern, Summary


LOG2_E = 1 / log(2)


class Budget(NamedTuple):
    """How much is worked on at a time: on a CPU what its cache holds, elsewhere what keeps the device busy."""

    positions: int
    scores: int


CPU_BUDGET = Budget(positions=2**13, scores=2**20)
DEVICE_BUDGET = Budget(positions=2**20, scores=2**25)


def attend_blocked(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, tile by tile."""
    return blocked_forward(q, k, v, notation.write(heads), scale)[0]


@torch.library.custom_op("longstride::blocked_forward", mutates_args=())
def blocked_forward(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of every query's scores: +inf where it sees no key."""
    output, log_sum_exp = _forward_like(q, k, v, patterns, scale)
    scratch = Scratch(q)
    with torch.autocast(q.device.type, enabled=False):
        for pattern, head in _head_by_head(q, patterns):
            inputs = _take(q, head), _take(k, head), _take(v, head)
            weighted = _zeros(output, head)
            weight = torch.zeros_like(weighted[..., :1])
            largest = torch.full_like(weight, torch.finfo(weight.dtype).min)
            for arrangement in plan(pattern, q.shape[2]):
                for lanes in _lane_groups(arrangement, inputs[0]):
                    arranged = lanes.load_queries(inputs[0]), lanes.load_keys(inputs[1]), lanes.load_keys(inputs[2])
                    states = [lanes.load_queries(state) for state in (largest, weight, weighted)]
                    for chunk in lanes.chunks(scratch):
                        _forward_chunk(chunk, scratch, scale, *arranged, *states)
                    for state, total in zip(states, (largest, weight, weighted)):
                        lanes.store_queries(state, total)
            empty = weight == 0
            _put(weighted.div_(weight.masked_fill(empty, 1)), output, head)
            log_sum_exp[head] = weight.log2_().add_(largest).masked_fill_(empty, torch.inf).squeeze(-1)
    return output, log_sum_exp


@torch.library.custom_op("longstride::blocked_backward", mutates_args=())
def blocked_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    patterns: str,
    scale: float,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; one that is not needed is left empty."""
    results = _backward_like(gradient, q, k, v, output, log_sum_exp, patterns, scale, needed)
    scratch = Scratch(q)
    with torch.autocast(q.device.type, enabled=False):
        for pattern, head in _head_by_head(q, patterns):
            inputs = _take(q, head), _take(k, head), _take(v, head)
            slopes = _take(gradient, head)
            # A query's weights sum to 1, so the gradients of its scores lose their mean, which is this product.
            mean = (slopes * _take(output, head)).sum(-1, keepdim=True)
            by_query = slopes, mean, log_sum_exp[head].unsqueeze(-1)
            totals = [_zeros(x, head) if wanted else None for x, wanted in zip(results, needed)]
            for arrangement in plan(pattern, q.shape[2]):
                for lanes in _lane_groups(arrangement, inputs[0]):
                    loads = lanes.load_queries, lanes.load_keys, lanes.load_keys
                    stores = lanes.store_queries, lanes.store_keys, lanes.store_keys
                    arranged = [load(x) for load, x in zip(loads, inputs)]
                    sums = [None if x is None else load(x) for load, x in zip(loads, totals)]
                    arranged += [lanes.load_queries(x) for x in by_query]
                    for chunk in lanes.chunks(scratch):
                        _backward_chunk(chunk, scratch, scale, *arranged, *sums)
                    for store, part, total in zip(stores, sums, totals):
                        if part is not None and total is not None:
                            store(part, total)
            for result, total in zip(results, totals):
                if total is not None:
                    _put(total, result, head)
    return results


def _forward_chunk(
    chunk: "Chunk", scratch: "Scratch", scale: float, q: Tensor, k: Tensor, v: Tensor, largest: Tensor, weight: Tensor, weighted: Tensor
) -> None:
    scores = chunk.scores(chunk.queries(q), chunk.keys(k), scale * LOG2_E, scratch)
    before = chunk.query_windows(largest)
    now = torch.maximum(before, scores.amax(-1, keepdim=True).view(before.shape))
    weights = scores.sub_(now.flatten(0, 1)).exp2_()
    kept = (before - now).exp2_()
    before.copy_(now)
    chunk.query_windows(weight).mul_(kept).add_(weights.sum(-1, keepdim=True).view(kept.shape))
    scratch.add_product(chunk.query_windows(weighted).mul_(kept), weights, chunk.keys(v), 1)


def _backward_chunk(
    chunk: "Chunk",
    scratch: "Scratch",
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    mean: Tensor,
    log_sum_exp: Tensor,
    q_sum: Tensor | None,
    k_sum: Tensor | None,
    v_sum: Tensor | None,
) -> None:
    queries, keys, output_slopes = chunk.queries(q), chunk.keys(k), chunk.queries(slopes)
    weights = chunk.scores(queries, keys, scale * LOG2_E, scratch).sub_(chunk.queries(log_sum_exp)).exp2_()
    if v_sum is not None:
        chunk.add_to_keys(v_sum, weights.transpose(1, 2), output_slopes, 1, scratch)
    if q_sum is None and k_sum is None:
        return
    score_slopes = scratch.product("slopes", output_slopes, chunk.keys(v).transpose(1, 2))
    score_slopes.sub_(chunk.queries(mean)).mul_(weights)
    if q_sum is not None:
        scratch.add_product(chunk.query_windows(q_sum), score_slopes, keys, scale)
    if k_sum is not None:
        chunk.add_to_keys(k_sum, score_slopes.transpose(1, 2), queries, scale, scratch)


class LaneGroup(NamedTuple):
    """Some lanes of an arrangement, worked on together."""

    arrangement: Arrangement
    first: int
    count: int
    batch: int
    dtype: torch.dtype
    device: torch.device

    def load_queries(self, x: Tensor) -> Tensor:
        """[batch, n, d] -> [lanes, length, d]: a view where the arrangement has one, or else a copy."""
        return self.arrangement.in_lanes(x)[:, self.first : self.first + self.count].flatten(0, 1)

    def store_queries(self, lanes: Tensor, x: Tensor) -> None:
        """Puts back what `load_queries` took, where it was a copy."""
        target = self.arrangement.in_lanes(x)[:, self.first : self.first + self.count]
        if lanes.data_ptr() != target.data_ptr():
            target.copy_(lanes.view(target.shape))

    def load_keys(self, x: Tensor) -> Tensor:
        """The same for the keys, of which Summary has only the cells: [batch, n, d] -> [batch, cells, d]."""
        leaf = self.arrangement.leaf
        return x[:, self._cells(leaf)] if isinstance(leaf, Summary) else self.load_queries(x)

    def store_keys(self, lanes: Tensor, x: Tensor) -> None:
        leaf = self.arrangement.leaf
        if isinstance(leaf, Summary):
            x[:, self._cells(leaf)] = lanes
        else:
            self.store_queries(lanes, x)

    def _cells(self, summary: Summary) -> Tensor:
        cells = torch.arange(summary.cells_before(self.arrangement.length), device=self.device)
        return self.arrangement.key_position(0, cells)

    def chunks(self, scratch: "Scratch") -> "Iterator[Chunk]":
        """The tiles of these lanes, in chunks of about as many scores as the budget has."""
        lane = torch.arange(self.first, self.first + self.count, device=self.device).repeat(self.batch)
        for tiles in self.arrangement.tiles:
            at_once = max(1, _budget(self.device).scores // (len(lane) * tiles.rows * tiles.columns))
            bias = None
            if tiles.masked and tiles.uniform:
                if (self.arrangement, tiles) not in scratch.biases:
                    scratch.biases[self.arrangement, tiles] = self._bias(tiles, lane[:1], torch.zeros_like(lane[:1]))
                bias = scratch.biases[self.arrangement, tiles]
            for first in range(0, tiles.count, at_once):
                count = min(at_once, tiles.count - first)
                if tiles.masked and not tiles.uniform:
                    bias = self._bias(tiles, lane, torch.arange(first, first + count, device=self.device))
                yield Chunk(tiles, first, count, bias)

    def _bias(self, tiles: Tiles, lane: Tensor, tile: Tensor) -> Tensor:
        """0 where a pair counts and -inf where it does not: [tiles, rows, columns], one tile if all are alike."""
        hidden = ~self.arrangement.visible(tiles, lane, tile).flatten(0, 1)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)


class Chunk(NamedTuple):
    """Some tiles of one shape, in all the lanes of a group, that are computed together."""

    tiles: Tiles
    first: int
    count: int
    bias: Tensor | None

    def queries(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> [lanes * tiles, rows, d]."""
        return self.query_windows(x).flatten(0, 1)

    def query_windows(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> the view [lanes, tiles, rows, d]."""
        tiles = self.tiles
        return _windows(x, tiles.query + self.first * tiles.query_shift, tiles.query_shift, tiles.rows, self.count)

    def keys(self, x: Tensor) -> Tensor:
        """[lanes, length, d] -> [lanes * tiles, columns, d]."""
        tiles = self.tiles
        start = tiles.key + self.first * tiles.key_shift
        return _windows(x, start, tiles.key_shift, tiles.columns, self.count).flatten(0, 1)

    def add_to_keys(self, total: Tensor, left: Tensor, right: Tensor, factor: float, scratch: "Scratch") -> None:
        """Adds left right * factor, [lanes * tiles, columns, d]. Neighbouring tiles may share keys, so a shift at a time."""
        tiles = self.tiles
        start = tiles.key + self.first * tiles.key_shift
        width = tiles.key_shift if self.count > 1 else tiles.columns
        for offset in range(0, tiles.columns, width):
            columns = left[:, offset : offset + width]
            target = _windows(total, start + offset, tiles.key_shift, columns.shape[1], self.count)
            scratch.add_product(target, columns, right, factor)

    def scores(self, queries: Tensor, keys: Tensor, scale: float, scratch: "Scratch") -> Tensor:
        """q k^T * scale, and -inf for pairs that do not count."""
        return scratch.product("scores", queries, keys.transpose(1, 2), scale, self.bias)


class Scratch:
    """Memory for the products of a chunk, used again for the next: fresh memory costs a CPU more than the sums in it."""

    def __init__(self, like: Tensor) -> None:
        self.empty = torch.empty(0, dtype=_working_dtype(like), device=like.device)
        self.buffers: dict[str, Tensor] = {}
        self.biases: dict[tuple[Arrangement, Tiles], Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor, factor: float = 1, bias: Tensor | None = None) -> Tensor:
        """left right * factor + bias as a batch of matrix products, in the memory of that name."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        size = shape[0] * shape[1] * shape[2]
        if self.buffers.get(name, self.empty).numel() < size:
            self.buffers[name] = self.empty.new_empty(size)
        result = self.buffers[name][:size].view(shape)
        start, beta = (result, 0) if bias is None else (bias, 1)
        return torch.baddbmm(start, left, right, beta=beta, alpha=factor, out=result)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        """Adds left right * factor to a view [lanes, tiles, ...]; where that is contiguous, as part of the product."""
        if total.is_contiguous():
            place = total.flatten(0, 1)
            torch.baddbmm(place, left, right, alpha=factor, out=place)
        else:
            total.add_(self.product("sum", left, right).view(total.shape), alpha=factor)


def _windows(x: Tensor, start: int, shift: int, size: int, count: int) -> Tensor:
    """[lanes, length, d] -> the view [lanes, count, size, d] of windows that start `shift` apart."""
    if count == 1:
        return x[:, None, start : start + size]
    return x[:, start : start + (count - 1) * shift + size].unfold(1, size, shift).transpose(2, 3)


def _head_by_head(q: Tensor, patterns: str) -> Iterator[tuple[Pattern, tuple[slice, int]]]:
    """Each head's pattern and the index of the head, for as much of the batch at a time as the budget has."""
    at_once = max(1, _budget(q.device).positions // q.shape[2])
    for head, pattern in enumerate(notation.parse(patterns)):
        for first in range(0, len(q), at_once):
            yield pattern, (slice(first, first + at_once), head)


def _lane_groups(arrangement: Arrangement, q: Tensor) -> Iterator[LaneGroup]:
    at_once = max(1, _budget(q.device).positions // (len(q) * arrangement.length))
    for first in range(0, arrangement.lanes, at_once):
        yield LaneGroup(arrangement, first, min(at_once, arrangement.lanes - first), len(q), q.dtype, q.device)


def _budget(device: torch.device) -> Budget:
    return CPU_BUDGET if device.type == "cpu" else DEVICE_BUDGET


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
def _forward_like(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape[:-1], dtype=_working_dtype(v))


@blocked_backward.register_fake
def _backward_like(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    patterns: str,
    scale: float,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    like_q, like_k, like_v = (x.new_empty(x.shape if wanted else 0) for x, wanted in zip((q, k, v), needed))
    return like_q, like_k, like_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.patterns, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    gradients = blocked_backward(gradient, *ctx.saved_tensors, ctx.patterns, ctx.scale, needed)
    return *(x if wanted else None for x, wanted in zip(gradients, needed)), None, None


blocked_forward.register_autograd(_differentiate, setup_context=_save)
