"""The backend for Hopper GPUs: the launches for a pass, if `choice.choose` has a kernel for it.

TMA reads a tensor through a descriptor. For lanes it is [batch, heads, n / step, step, d], and a copy takes positions of one
lane. For summary cells it is [batch, heads, blocks, block, d], and a copy takes the cells of several blocks.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.arguments import Gradients, compiled, matrix, row_shape, row_sizes
from longstride.attention.kernels.backward import backward_row_stats, backward_sum_parts
from longstride.attention.kernels.call import Backward, Forward, has_only_documents, matrices_of
from longstride.attention.kernels.hopper import (
    choice,
    chunk_forward,
    lane_backward,
    lane_forward,
    lane_settings,
    walk_backward,
    walk_forward,
)
from longstride.attention.kernels.hopper.backward_dkv import hopper_dkv
from longstride.attention.kernels.hopper.backward_dq import hopper_dq
from longstride.attention.kernels.hopper.choice import ROWS, TILE, WIDEST, fits_tma
from longstride.attention.kernels.hopper.lane_descriptors import (
    LaneLaunch,
    LaneTiles,
    WalkLaunch,
    WalkTiles,
    lane_descriptor,
)
from longstride.attention.kernels.hopper.past_forward import GROUPS_OF, past_forward
from longstride.attention.kernels.hopper.tiles import KeyKinds, RowStats, Work
from longstride.attention.kernels.hopper.window_forward import window_forward
from longstride.attention.kernels.jobs import Job, Pass
from longstride.attention.kernels.launch import Descriptor, Launch, constant
from longstride.attention.kernels.settings import padded, processors
from longstride.attention.kernels.work import walk_tiles
from longstride.patterns.geometry import Lanes, lane_sets

STATS_ROWS = 64
"""Queries of a program of `backward_row_stats`."""
PART_ROWS = 16
"""Cells of a program of `backward_sum_parts`."""
LEAST_QUERIES = 2048
"""Queries of a tile of cells that are worth an item of their own: two more launches take as long as about a thousand."""


def order(call: Forward | Backward, passes: list[Pass]) -> list[Pass]:
    kinds = [_kind(call, pass_, index > 0) for index, pass_ in enumerate(passes)]
    lanes_first = isinstance(call, Forward) and call.v.shape[3] in choice.LANES_FIRST and kinds == ["walk", "lanes"]
    return passes[::-1] if lanes_first else passes


def forward(call: Forward, pass_: Pass, accumulate: bool) -> list[Launch] | None:
    kind, job, n = _kind(call, pass_, accumulate), pass_.jobs[0], call.q.shape[2]
    if kind is None:
        return None
    if kind == "walk":
        return [launch_walk(call, _reach(call, job), accumulate)]
    if kind == "lanes":
        return [_whole_lanes(call, lanes, job.near, accumulate) for lanes in lane_sets(job, n)]
    if kind == "chunks":
        return [_chunks(call, lanes) for lanes in lane_sets(job, n)]
    return [_tiles(call, pass_, accumulate)]


def backward(call: Backward, pass_: Pass, accumulate: bool) -> list[Launch] | None:
    kind, job, n = _kind(call, pass_, accumulate), pass_.jobs[0], call.q.shape[2]
    if kind is None:
        return None
    if kind == "walk":
        return [launch_walk(call, _reach(call, job))]
    if kind == "lanes":
        return [_whole_lanes(call, lanes, job.near, accumulate) for lanes in lane_sets(job, n)]
    row_stats = _new_row_stats(call, job.index_stride)
    apart = choice.own_blocks_apart(pass_, call.q.shape[3], call.v.shape[3])
    if apart:  # The own blocks' part, as if there were no cells: the sums are those of all keys.
        launches = [_whole_lanes(call, lanes, 0, accumulate, row_stats) for lanes in lane_sets(job, n)]
    else:
        launches = [_fill_row_stats(call, row_stats, job.index_stride)]
    if call.need_q:
        launches.append(_dq(call, row_stats, pass_, not apart, accumulate or apart))
    if call.need_kv and not apart:
        launches += _dkv(call, row_stats, pass_, False, accumulate)
    if call.need_kv and pass_.summary:
        launches += _dkv(call, row_stats, pass_, True, True)
    return launches


def _kind(call: Forward | Backward, pass_: Pass, accumulate: bool) -> choice.Kind | None:
    """The kind of kernel for a pass; None if there is none, or TMA does not read the tensors. Walks alone take documents."""
    if not fits_tma(*matrices_of(call)):
        return None
    _, heads, n, d_qk = call.q.shape
    kind = choice.choose(pass_, isinstance(call, Backward), accumulate, heads, n, d_qk, call.v.shape[3])
    if call.layout is None:
        return kind
    takes_documents = kind == "walk" and not accumulate and has_only_documents(call)
    return kind if takes_documents and choice.long_enough(call.layout.lengths) else None


def _reach(call: Forward | Backward, job: Job) -> int:
    """How far a walk looks back. That is compiled in, so in documents that are no longer it is a whole number of tiles,
    whatever the longest document is."""
    whole_past = job.far >= job.limit - 1
    return -(-max(job.far, 1) // ROWS) * ROWS if call.layout is not None and whole_past else job.far


def launch_walk(call: Forward | Backward, reach: int, accumulate: bool = False) -> Launch:
    """For Local(reach), reach <= 128: programs share the positions of all heads. Backward there is no earlier pass.

    Where heads are side by side in memory, each head has the same number of whole programs. These then read neighbouring
    addresses at about the same time.
    """
    (batch, heads, n, d), matrices = call.q.shape, matrices_of(call)
    panels = call.v.shape[3] // d
    back = 1 if reach <= ROWS else 2
    assert reach <= back * ROWS
    described: list[Any] = [lane_descriptor(x, Lanes(0, 1, n, n, 1), (1, ROWS, d)) for x in matrices]
    rows: Any  # Results that a walk over documents also stores by rows.
    scale: Any
    if isinstance(call, Forward):
        kernel, setting = walk_forward.walk_forward, lane_settings.walk_forward_settings(d, panels, accumulate)
        rows, between, scale, flags = matrix(call.output), 0, call.scale, {"ACCUMULATE": accumulate}
    else:
        kernel, setting = walk_backward.walk_backward, lane_settings.walk_backward_settings(d, panels)
        rows, between, scale, flags = Gradients(*map(matrix, matrices[5:])), back, call.scales, {}
        if panels > 1:
            described[4] = matrix(call.output)
    documents = call.layout.documents if call.layout else None
    if documents is None:
        sequences, tiles = batch * heads, -(-n // ROWS)
        work = WalkLaunch(sequences * (tiles + back), heads, n, tiles)
    else:
        table = walk_tiles(documents, ROWS, between)
        sequences = documents.repeats * heads
        work = WalkLaunch(sequences * len(table), heads, n, len(table), constant(table, call.q.device))
    walk = compiled(
        WalkTiles, far=reach, back=back, ahead=setting.stages, part=setting.part, panels=panels,
        documents=documents is not None,
    )  # fmt: skip
    programs = processors(call.q.device) * setting.per_processor
    if _heads_side_by_side(call.q) and programs > sequences:
        programs -= programs % sequences
    arguments = *described, None if documents is None else rows, call.lse, work, scale
    constants = {"WALK": walk, **flags, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, min(programs, work.positions), arguments, constants)


def _whole_lanes(
    call: Forward | Backward, lanes: Lanes, near: int, accumulate: bool, row_stats: Tensor | None = None
) -> Launch:  # fmt: skip
    """For the positions of these lanes. TMA copies whole lanes of the inputs in, and tiles of the results out.

    row_stats [batch * heads, 2, at least n]: backward fills it for other kernels.
    """
    batch, heads, n, d = call.q.shape
    panels = call.v.shape[3] // d
    rows = padded(lanes.length, ROWS)
    work = LaneLaunch(*lanes, batch * heads * lanes.lanes, heads, n)
    arguments: tuple[Any, ...]
    if isinstance(call, Forward):
        assert lanes.length <= choice.LONGEST_LANE
        kernel, setting = lane_forward.lane_forward, lane_settings.lane_forward_settings(d, panels, rows, accumulate)
        inputs, arguments, flags = 3, (call.lse, work, call.scale), {}
    else:
        assert lanes.length * d <= choice.LARGEST_LANE
        kernel, setting = lane_backward.lane_backward, lane_settings.lane_backward_settings(d, panels, rows, accumulate)
        stats = RowStats(call.lse, 0) if row_stats is None else RowStats(row_stats, row_stats.shape[2])
        inputs, arguments, flags = 5, (call.lse, stats, work, call.scales), {"STORE_STATS": row_stats is not None}
    matrices = matrices_of(call)
    heights = [rows] * inputs + [ROWS] * (len(matrices) - inputs)
    descriptors = [lane_descriptor(x, lanes, (1, height, d)) for x, height in zip(matrices, heights)]
    tiles = compiled(
        LaneTiles, near=near, stages=setting.stages, staged=setting.staged, part=setting.part, panels=panels,
        heads_first=_heads_side_by_side(call.q),
    )  # fmt: skip
    programs = min(work.items, processors(call.q.device) * setting.per_processor)
    constants = {"TILES": tiles, "ACCUMULATE": accumulate, **flags, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, programs, (*descriptors, *arguments), constants)


def _chunks(call: Forward, lanes: Lanes) -> Launch:
    """For the positions of these lanes."""
    batch, heads, n, d = call.q.shape
    setting = lane_settings.chunk_settings(d)
    work = LaneLaunch(*lanes, batch * heads * lanes.lanes * -(-lanes.length // ROWS), heads, n)
    descriptors = [lane_descriptor(x, lanes, (1, ROWS, d)) for x in matrices_of(call)]
    constants = {
        "STAGES": setting.stages, "HEADS_FIRST": _heads_side_by_side(call.q), "num_warps": 4, "maxnreg": setting.registers,
    }  # fmt: skip
    programs = min(work.items, setting.per_processor * processors(call.q.device))
    return Launch(chunk_forward.chunk_forward, programs, (*descriptors, call.lse, work, call.scale), constants)


def _heads_side_by_side(x: Tensor) -> bool:
    """Whether heads are closer in memory than positions, as in [batch, n, heads, d]."""
    return x.stride(1) < x.stride(2)


def _tiles(call: Forward, pass_: Pass, accumulate: bool) -> Launch:
    """One tile of keys after the other: of a window, or of the lane's whole past and of summary cells."""
    job, (q, k, v, output, lse) = pass_.jobs[0], call.tensors
    past = job.far >= job.limit - 1
    kernel, rows = (past_forward, ROWS) if past else (window_forward, TILE)
    groups = {"GROUPS": GROUPS_OF[_panels(v)]} if past else {}
    tiles = -(-job.limit // rows)
    work = _work(call, pass_, -(-tiles * job.lanes // groups.get("GROUPS", 1)), tiles)
    keys = _key_descriptors(k, v, pass_)[: 4 if past else 2]
    arguments = _lanes(q, job.index_stride, ROWS), *keys, matrix(output), lse, job, work, call.scale
    constants = {"D_V": v.shape[3], "KEYS": _keys(v, job, pass_.summary), "ACCUMULATE": accumulate, "num_warps": 4, **groups}
    return Launch(kernel, min(work.items, processors(q.device)), arguments, constants)


def _dq(call: Backward, row_stats: Tensor, pass_: Pass, window: bool, accumulate: bool) -> Launch:
    job, q = pass_.jobs[0], call.q
    tiles = -(-job.limit // TILE)
    work = _work(call, pass_, tiles * job.lanes, tiles)
    arguments = (
        *(_lanes(x, job.index_stride, TILE) for x in (q, call.d_output)), *_key_descriptors(call.k, call.v, pass_),
        RowStats(row_stats, row_stats.shape[2]), matrix(call.dq), job, work, call.scales,
    )  # fmt: skip
    keys = _keys(call.v, job, pass_.summary, window)
    constants = {"D_QK": q.shape[3], "KEYS": keys, "ACCUMULATE": accumulate, "num_warps": 4}
    return Launch(hopper_dq, min(work.items, processors(q.device)), arguments, constants)


def _dkv(call: Backward, row_stats: Tensor, pass_: Pass, cells: bool, accumulate: bool) -> list[Launch]:
    """For keys of the own lane; or for summary cells, which later lanes see."""
    job, (batch, heads, n, d_qk) = pass_.jobs[0], call.q.shape
    tiles = -(-job.limit // TILE)
    count = (job.lanes - 1) * job.cells
    items = -(-count // TILE) if cells else tiles * job.lanes
    splits = _splits(batch * heads * items, n, processors(call.q.device)) if cells else 1
    gradients = call.dk, call.dv
    results = [matrix(x) for x in gradients]
    sums = []
    if splits > 1:
        parts = [call.workspace.new(batch, heads, count, splits * x.shape[3]) for x in gradients]
        results = [matrix(part)._replace(row=x.shape[3]) for part, x in zip(parts, gradients)]
        sums = [_sum_parts(part, x, pass_, splits) for part, x in zip(parts, gradients)]
    work = _work(call, pass_, items, tiles, splits)
    stats_shape = batch * heads, 2, n if job.index_stride == 1 else row_stats.shape[2]
    arguments = (
        _lanes(call.q, job.index_stride, ROWS),
        *(_cells(x, job) if cells else _lanes(x, job.index_stride, TILE) for x in (call.k, call.v)),
        _lanes(call.d_output, job.index_stride, ROWS),
        Descriptor(row_stats, 0, stats_shape, row_stats.stride(), (1, 2, ROWS)), *results, job, work, call.scales,
    )  # fmt: skip
    constants = {
        "D_QK": d_qk, "D_V": call.v.shape[3], "KEYS": _keys(call.v, job, cells), "SPLIT": splits > 1,
        "ACCUMULATE": accumulate and splits == 1, "num_warps": 4,
    }  # fmt: skip
    return [Launch(hopper_dkv, min(work.items, processors(call.q.device)), arguments, constants), *sums]


def _splits(items: int, n: int, programs: int) -> int:
    """How many items share the queries of a tile of cells, so that all programs have about the same work.

    Later cells have fewer queries. With one and a half tiles for each program or more, the order of items balances that.
    """
    if 2 * items >= 3 * programs:
        return 1
    return max(1, min(-(-4 * programs // items), n // LEAST_QUERIES))


def _sum_parts(parts: Tensor, gradient: Tensor, pass_: Pass, splits: int) -> Launch:
    sizes = row_sizes(parts, PART_ROWS)
    arguments = matrix(parts), matrix(gradient), _first_cells(pass_, parts.device), pass_.jobs[0], sizes, splits
    constants = {"ROW": row_shape(gradient, True), "ROWS": PART_ROWS}
    return Launch(backward_sum_parts, sizes.total, arguments, constants)


def _new_row_stats(call: Backward, step: int) -> Tensor:
    """[batch * heads, 2, n], padded after each lane. TMA reads zeros past n, and a query with stats of 0 adds nothing."""
    size, heads, n = call.lse.shape
    return call.workspace.new(size * heads, 2, step * _stats_of_lane(n, step), zero=step > 1)


def _stats_of_lane(n: int, step: int) -> int:
    """How many row stats a residue class has, padded to multiples of 16 bytes for TMA: they lie side by side."""
    return -(-n // (4 * step)) * 4


def _fill_row_stats(call: Backward, row_stats: Tensor, step: int) -> Launch:
    sizes = row_sizes(call.output, STATS_ROWS)
    places = row_stats.shape[2], step, _stats_of_lane(call.output.shape[2], step)
    arguments = matrix(call.d_output), matrix(call.output), call.lse, row_stats, sizes, *places
    constants = {"ROW": row_shape(call.output, True), "ROWS": STATS_ROWS}
    return Launch(backward_row_stats, sizes.total, arguments, constants)


def _work(call: Forward | Backward, pass_: Pass, items: int, tiles: int, splits: int = 1) -> Work:
    """items: of a head, before each is split; tiles: of a lane."""
    batch, heads, n, _ = call.q.shape
    job = pass_.jobs[0]
    shifts = (0, 1, _stats_of_lane(n, job.index_stride)) if job.index_stride > 1 else (job.lane_stride, 0, job.lane_stride)
    return Work(
        batch * heads * items * splits, heads, batch * heads, n, tiles, tiles * job.lanes, *shifts,
        _first_cells(pass_, call.q.device), splits,
    )  # fmt: skip


def _keys(v: Tensor, job: Job, cells: bool, window: bool = True) -> KeyKinds:
    return compiled(KeyKinds, cells=job.cells if cells else 0, own=bool(job.own), window=window, panels=_panels(v))


def _panels(v: Tensor) -> int:
    return -(-v.shape[3] // WIDEST)


@lru_cache(maxsize=256)
def _first_cells(pass_: Pass, device: torch.device) -> Tensor:
    return constant([job.first_cell for job in pass_.jobs], device)


def _key_descriptors(k: Tensor, v: Tensor, pass_: Pass) -> list[Descriptor]:
    """For windows, then for cells; where there are no cells, those for windows once more."""
    job = pass_.jobs[0]
    windows = [_lanes(x, job.index_stride, TILE) for x in (k, v)]
    return [*windows, *([_cells(x, job) for x in (k, v)] if pass_.summary else windows)]


def _lanes(x: Tensor, step: int, rows: int) -> Descriptor:
    return lane_descriptor(x, _whole_blocks(x, step), (rows, 1, _columns(x)))


def _cells(x: Tensor, job: Job) -> Descriptor:
    together = max(1, TILE // job.cells)
    return lane_descriptor(x, _whole_blocks(x, job.block), (together, TILE // together, _columns(x)))


def _columns(x: Tensor) -> int:
    """Of a tile, or of a panel of it."""
    return min(padded(x.shape[3]), WIDEST)


def _whole_blocks(x: Tensor, length: int) -> Lanes:
    return Lanes(0, x.shape[2] // length, length, length, 1)
