"""The backend for Hopper GPUs: the launches for a pass, if `choice.choose` has a kernel for it.

The copy engine reads a tensor through a view: [batch, heads, n / step, step, d] for lanes, of which a box is some positions
of one lane, and [batch, heads, blocks, block, d] for summary cells, of which a box has the cells of several blocks.
"""

from functools import lru_cache

import torch
from torch import Tensor

from longstride.attention.kernels.arguments import matrix, row_shape, row_sizes
from longstride.attention.kernels.call import Backward, Forward
from longstride.attention.kernels.hopper.backward_dkv import hopper_dkv
from longstride.attention.kernels.hopper.backward_dq import hopper_dq
from longstride.attention.kernels.hopper.choice import TILE, choose, copyable, whole_lanes
from longstride.attention.kernels.hopper.lane_backward import launch_lane_backward
from longstride.attention.kernels.hopper.lane_boxes import distance
from longstride.attention.kernels.hopper.lane_forward import launch_lane_forward
from longstride.attention.kernels.hopper.numbers import backward_numbers
from longstride.attention.kernels.hopper.past_forward import GROUPS, past_forward
from longstride.attention.kernels.hopper.walk_backward import launch_walk_backward
from longstride.attention.kernels.hopper.walk_forward import launch_walk_forward
from longstride.attention.kernels.hopper.window_forward import window_forward
from longstride.attention.kernels.jobs import Job, Pass
from longstride.attention.kernels.launch import Box, Launch, constant
from longstride.attention.kernels.settings import padded, processors
from longstride.patterns.geometry import Lanes, block_lanes, column_lanes

ROWS = 64
"""Queries of a group of warps."""
NUMBER_ROWS = 64


def forward(call: Forward, one: Pass, accumulate: bool) -> list[Launch] | None:
    _, heads, n, d_qk = call.q.shape
    if not copyable(call.q, call.k, call.v, call.output):
        return None
    kind = choose(one, False, accumulate, heads, n, d_qk, call.v.shape[3])
    job = one.jobs[0]
    if kind is None:
        return None
    if kind == "walk":
        return [launch_walk_forward(call, job.far)]
    if kind == "lanes":
        return [launch_lane_forward(call, lanes, job.near, accumulate) for lanes in _lane_sets(job, n)]
    return [(_window if job.far < job.limit - 1 else _past)(call, one, accumulate)]


def backward(call: Backward, one: Pass, accumulate: bool) -> list[Launch] | None:
    _, heads, n, d_qk = call.q.shape
    d_v = call.v.shape[3]
    if not copyable(call.q, call.k, call.v, call.d_output, call.output, call.dq, call.dk, call.dv):
        return None
    kind = choose(one, True, accumulate, heads, n, d_qk, d_v)
    job = one.jobs[0]
    if kind is None:
        return None
    if kind == "walk":
        return [launch_walk_backward(call, job.far)]
    if kind == "lanes":
        return [launch_lane_backward(call, lanes, job.near, accumulate) for lanes in _lane_sets(job, n)]
    numbers = _new_numbers(call, job.step)
    whole = one.summary and bool(job.own) and whole_lanes(job, True, d_qk, d_v)
    if whole:  # The own blocks' part, as if there were no cells: the sums are those of all keys.
        launches = [launch_lane_backward(call, lanes, 0, accumulate, numbers) for lanes in block_lanes(n, job.block)]
    else:
        launches = [_fill_numbers(call, numbers, job.step)]
    if call.need_q:
        launches.append(_dq(call, numbers, one, not whole, accumulate or whole))
    if call.need_kv and not whole:
        launches.append(_dkv(call, numbers, one, False, accumulate))
    if call.need_kv and one.summary:
        launches.append(_dkv(call, numbers, one, True, True))
    return launches


def _lane_sets(job: Job, n: int) -> list[Lanes]:
    """A job is of residue classes, or of blocks; one lane alone is both."""
    return column_lanes(n, job.step) if job.lane_shift == 1 else block_lanes(n, job.block)


def _window(call: Forward, one: Pass, accumulate: bool) -> Launch:
    job, (q, k, v, output, lse) = one.jobs[0], call.tensors
    size, heads, n, _ = q.shape
    along = -(-job.limit // TILE)
    items = size * heads * along * job.lanes
    arguments = (
        _lanes(q, job.step, ROWS), *(_lanes(x, job.step, TILE) for x in (k, v)), output, lse, *output.stride()[:3],
        items, size * heads, heads, job.lanes, along, *_geometry(job), job.near, job.far, job.limit, n, call.scale,
    )  # fmt: skip
    constants = {"D_V": v.shape[3], "LATER": accumulate, "num_warps": 4}
    return Launch(window_forward, min(items, processors(q.device)), arguments, constants)


def _past(call: Forward, one: Pass, accumulate: bool) -> Launch:
    job, (q, k, v, output, lse) = one.jobs[0], call.tensors
    size, heads, n, _ = q.shape
    in_lane = -(-job.limit // ROWS)
    units = in_lane * job.lanes
    items = size * heads * -(-units // GROUPS.value)
    cells = job.cells if one.summary else 0
    arguments = (
        _lanes(q, job.step, ROWS), *_key_boxes(k, v, one), output, lse, _first_cells(one, q.device),
        *output.stride()[:3], items, size * heads, heads, units, in_lane, *_geometry(job), job.limit, job.near, cells,
        job.cells, n, call.scale,
    )  # fmt: skip
    constants = {"D_V": v.shape[3], "CELLS": cells, "OWN": bool(job.own), "LATER": accumulate, "num_warps": 4}
    return Launch(past_forward, min(items, processors(q.device)), arguments, constants)


def _dq(call: Backward, numbers: Tensor, one: Pass, window: bool, accumulate: bool) -> Launch:
    job, q, dq = one.jobs[0], call.q, call.dq
    size, heads, n, d_qk = q.shape
    along = -(-job.limit // TILE)
    items = size * heads * along * job.lanes
    cells = job.cells if one.summary else 0
    arguments = (
        _lanes(q, job.step, TILE), _lanes(call.d_output, job.step, TILE), *_key_boxes(call.k, call.v, one), numbers, dq,
        _first_cells(one, q.device), *dq.stride()[:3], items, size * heads, heads, job.lanes, along, *_geometry(job),
        cells, job.near, job.far, job.limit, n, numbers.shape[2], _number_shift(job, n), job.cells, *call.scales,
    )  # fmt: skip
    constants = {
        "D_QK": d_qk, "CELLS": cells, "OWN": bool(job.own), "WINDOW": window, "LATER": accumulate, "num_warps": 4,
    }  # fmt: skip
    return Launch(hopper_dq, min(items, processors(q.device)), arguments, constants)


def _dkv(call: Backward, numbers: Tensor, one: Pass, cells: bool, accumulate: bool) -> Launch:
    job, q, dk, dv = one.jobs[0], call.q, call.dk, call.dv
    size, heads, n, d_qk = q.shape
    along = -(-job.limit // TILE)
    key_count = (job.lanes - 1) * job.cells
    number_count = n if job.step == 1 else numbers.shape[2]
    items = size * heads * (-(-key_count // TILE) if cells else job.lanes * along)
    arguments = (
        _lanes(q, job.step, ROWS), *(_cells(x, job) if cells else _lanes(x, job.step, TILE) for x in (call.k, call.v)),
        _lanes(call.d_output, job.step, ROWS),
        Box(numbers, 0, (size * heads, 2, number_count), numbers.stride(), (1, 2, ROWS)),
        dk, dv, _first_cells(one, q.device), *dk.stride()[:3], *dv.stride()[:3], items, size * heads, heads, job.lanes,
        *_geometry(job), _number_shift(job, n), max(job.cells, 1), job.limit, job.near, job.far, n, key_count, job.block,
        *call.scales,
    )  # fmt: skip
    constants = {
        "D_QK": d_qk, "D_V": call.v.shape[3], "CELLS": job.cells if cells else 0, "OWN": bool(job.own),
        "LATER": accumulate, "num_warps": 4,
    }  # fmt: skip
    return Launch(hopper_dkv, min(items, processors(q.device)), arguments, constants)


def _new_numbers(call: Backward, step: int) -> Tensor:
    """[batch * heads, 2, n], and more where the copy engine's multiples of 16 bytes want it: at the end, and after a lane.

    What a box has past n it fills with zeros, and a query with zeros adds nothing.
    """
    size, heads, n = call.lse.shape
    return call.workspace.new(size * heads, 2, step * _aligned(-(-n // step)), zero=step > 1)


def _aligned(count: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-count // 4) * 4


def _fill_numbers(call: Backward, numbers: Tensor, step: int) -> Launch:
    """Lane by lane, if the step is more than 1: a box reads numbers that lie side by side."""
    sizes = row_sizes(call.output, NUMBER_ROWS)
    arguments = (
        matrix(call.d_output), matrix(call.output), call.lse, numbers, sizes, numbers.shape[2], step,
        _aligned(-(-call.output.shape[2] // step)),
    )  # fmt: skip
    constants = {"ROW": row_shape(call.output, True), "ROWS": NUMBER_ROWS}
    return Launch(backward_numbers, sizes.total, arguments, constants)


def _geometry(job: Job) -> tuple[int, int, int, int]:
    """Where a lane begins, by its number, and the step in it; and what the number moves a box's two coordinates by."""
    return job.lane_shift, job.step, *((0, 1) if job.step > 1 else (job.lane_shift, 0))


def _number_shift(job: Job, n: int) -> int:
    """How far apart the numbers of two lanes are."""
    return _aligned(n // job.step) if job.step > 1 else job.lane_shift


@lru_cache(maxsize=256)
def _first_cells(one: Pass, device: torch.device) -> Tensor:
    return constant([job.first_cell for job in one.jobs], device)


def _key_boxes(k: Tensor, v: Tensor, one: Pass) -> list[Box]:
    """Views for windows and for cells; where there are no cells, those for windows once more."""
    job = one.jobs[0]
    windows = [_lanes(x, job.step, TILE) for x in (k, v)]
    return [*windows, *([_cells(x, job) for x in (k, v)] if one.summary else windows)]


def _lanes(x: Tensor, step: int, rows: int) -> Box:
    shape = *x.shape[:2], x.shape[2] // step, step, x.shape[3]
    strides = distance(x, 0), distance(x, 1), step * distance(x, 2), distance(x, 2), 1
    return Box(x, 0, shape, strides, (1, 1, rows, 1, padded(x.shape[3])))


def _cells(x: Tensor, job: Job) -> Box:
    together = max(1, TILE // job.cells)
    shape = *x.shape[:2], x.shape[2] // job.block, job.block, x.shape[3]
    strides = distance(x, 0), distance(x, 1), job.block * distance(x, 2), distance(x, 2), 1
    return Box(x, 0, shape, strides, (1, 1, together, TILE // together, padded(x.shape[3])))
