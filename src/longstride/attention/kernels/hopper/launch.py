"""How the Hopper kernels are launched: `forward` and `backward`, for a pass that `choice.choose` gives to them.

The copy engine reads a tensor through a view: [batch, heads, n / step, step, d] for lanes, of which a box is some positions
of one lane, and [batch, heads, blocks, block, d] for summary cells, of which a box has the cells of several blocks.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longstride.attention.kernels.hopper.backward_dkv import hopper_dkv
from longstride.attention.kernels.hopper.backward_dq import hopper_dq
from longstride.attention.kernels.hopper.choice import TILE, Kind, whole_lanes
from longstride.attention.kernels.hopper.lane_backward import launch_lane_backward
from longstride.attention.kernels.hopper.lane_boxes import Lanes, block_lanes, column_lanes, distance
from longstride.attention.kernels.hopper.lane_forward import launch_lane_forward
from longstride.attention.kernels.hopper.numbers import backward_numbers
from longstride.attention.kernels.hopper.past_forward import GROUPS, past_forward
from longstride.attention.kernels.hopper.walk_backward import launch_walk_backward
from longstride.attention.kernels.hopper.walk_forward import launch_walk_forward
from longstride.attention.kernels.hopper.window_forward import window_forward
from longstride.attention.kernels.jobs import Job, Pass
from longstride.attention.kernels.settings import padded, processors

ROWS = 64
"""Queries of a group of warps."""
NUMBER_ROWS = 64


def forward(
    kind: Kind, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, one: Pass, scale: float, later: bool
) -> None:  # fmt: skip
    """Fills output and log_sum_exp; `scale` is in bits and positive. LATER: continues from what is there."""
    job = one.jobs[0]
    with torch.cuda.device(q.device):
        if kind == "walk":
            launch_walk_forward(q, k, v, output, log_sum_exp, job.far, scale)
        elif kind == "lanes":
            for lanes in _lane_sets(job, q.shape[2]):
                launch_lane_forward(q, k, v, output, log_sum_exp, lanes, scale, job.near, later)
        elif job.far < job.limit - 1:
            _forward_window(q, k, v, output, log_sum_exp, one, scale, later)
        else:
            _forward_past(q, k, v, output, log_sum_exp, one, scale, later)


def backward(
    kind: Kind, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, output: Tensor, log_sum_exp: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor, one: Pass, scales: tuple[float, float], later: bool, needed: tuple[bool, bool],
) -> None:  # fmt: skip
    """Fills the gradients, or adds to them.

    scales: the one in bits, and the plain one. needed: whether the gradient of the queries is, and whether the others are.
    """
    job = one.jobs[0]
    with torch.cuda.device(q.device):
        if kind == "walk":
            launch_walk_backward(q, k, v, gradient, output, log_sum_exp, dq, dk, dv, job.far, *scales)
        elif kind == "lanes":
            for lanes in _lane_sets(job, q.shape[2]):
                launch_lane_backward(
                    q, k, v, gradient, output, log_sum_exp, dq, dk, dv, lanes, *scales, job.near, later
                )  # fmt: skip
        else:
            numbers = _empty_numbers(log_sum_exp, job.step)
            whole = one.summary and bool(job.own) and whole_lanes(job, True, q.shape[3], v.shape[3])
            if whole:  # The own blocks' part, as if there were no cells: the sums are those of all keys.
                for lanes in block_lanes(q.shape[2], job.block):
                    launch_lane_backward(
                        q, k, v, gradient, output, log_sum_exp, dq, dk, dv, lanes, *scales, 0, later, numbers
                    )  # fmt: skip
            else:
                _fill_numbers(numbers, gradient, output, log_sum_exp, job.step)
            if needed[0]:
                _dq_tiles(q, k, v, gradient, numbers, dq, one, scales, not whole, later or whole)
            if needed[1] and not whole:
                _dkv_tiles(q, k, v, gradient, numbers, dk, dv, one, scales, False, later)
            if needed[1] and one.summary:
                _dkv_tiles(q, k, v, gradient, numbers, dk, dv, one, scales, True, True)


def _lane_sets(job: Job, n: int) -> list[Lanes]:
    """A job is of residue classes, or of blocks; one lane alone is both."""
    return column_lanes(n, job.step) if job.lane_shift == 1 else block_lanes(n, job.block)


def _forward_window(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, one: Pass, scale: float, later: bool
) -> None:
    job = one.jobs[0]
    size, heads, n, _ = q.shape
    along = -(-job.limit // TILE)
    items = size * heads * along * job.lanes
    window_forward[(min(items, processors(q.device)),)](
        _lanes(q, job.step, ROWS), *(_lanes(x, job.step, TILE) for x in (k, v)), output, log_sum_exp, *output.stride()[:3],
        items, size * heads, heads, job.lanes, along, *_geometry(job), job.near, job.far, job.limit, n, scale,
        D_V=v.shape[3], LATER=later, num_warps=4,
    )  # fmt: skip


def _forward_past(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, one: Pass, scale: float, later: bool
) -> None:
    job = one.jobs[0]
    size, heads, n, _ = q.shape
    in_lane = -(-job.limit // ROWS)
    units = in_lane * job.lanes
    items = size * heads * -(-units // GROUPS.value)
    cells = job.cells if one.summary else 0
    past_forward[(min(items, processors(q.device)),)](
        _lanes(q, job.step, ROWS), *_key_boxes(k, v, one), output, log_sum_exp, _first_cells(one, q.device),
        *output.stride()[:3], items, size * heads, heads, units, in_lane, *_geometry(job), job.limit, job.near, cells,
        job.cells, n, scale, D_V=v.shape[3], CELLS=cells, OWN=bool(job.own), LATER=later, num_warps=4,
    )  # fmt: skip


def _dq_tiles(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, numbers: Tensor, dq: Tensor, one: Pass, scales: tuple[float, float],
    window: bool, later: bool,
) -> None:  # fmt: skip
    job = one.jobs[0]
    size, heads, n, d_qk = q.shape
    along = -(-job.limit // TILE)
    items = size * heads * along * job.lanes
    hopper_dq[(min(items, processors(q.device)),)](
        _lanes(q, job.step, TILE), _lanes(gradient, job.step, TILE), *_key_boxes(k, v, one), numbers, dq,
        _first_cells(one, q.device), *dq.stride()[:3], items, size * heads, heads, job.lanes, along, *_geometry(job),
        job.cells if one.summary else 0, job.near, job.far, job.limit, n, numbers.shape[2],
        _number_shift(job, n), job.cells, *scales,
        D_QK=d_qk, CELLS=job.cells if one.summary else 0, OWN=bool(job.own), WINDOW=window, LATER=later, num_warps=4,
    )  # fmt: skip


def _dkv_tiles(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, numbers: Tensor, dk: Tensor, dv: Tensor, one: Pass,
    scales: tuple[float, float], cells: bool, later: bool,
) -> None:  # fmt: skip
    job = one.jobs[0]
    size, heads, n, d_qk = q.shape
    along = -(-job.limit // TILE)
    key_count = (job.lanes - 1) * job.cells
    number_count = n if job.step == 1 else numbers.shape[2]
    number_boxes = _boxes(numbers, [size * heads, 2, number_count], list(numbers.stride()), [1, 2, ROWS])
    items = size * heads * (-(-key_count // TILE) if cells else job.lanes * along)
    hopper_dkv[(min(items, processors(q.device)),)](
        _lanes(q, job.step, ROWS), *(_cells(x, job) if cells else _lanes(x, job.step, TILE) for x in (k, v)),
        _lanes(gradient, job.step, ROWS), number_boxes,
        dk, dv, _first_cells(one, q.device), *dk.stride()[:3], *dv.stride()[:3], items, size * heads, heads, job.lanes,
        *_geometry(job), _number_shift(job, n), max(job.cells, 1), job.limit, job.near, job.far, n, key_count, job.block,
        *scales, D_QK=d_qk, D_V=v.shape[3], CELLS=job.cells if cells else 0, OWN=bool(job.own), LATER=later, num_warps=4,
    )  # fmt: skip


def _empty_numbers(log_sum_exp: Tensor, step: int = 1) -> Tensor:
    """[batch * heads, 2, n], and more where the copy engine's multiples of 16 bytes want it: at the end, and after a lane.

    What a box has past n it fills with zeros, and a query with zeros adds nothing.
    """
    size, heads, n = log_sum_exp.shape
    make = log_sum_exp.new_empty if step == 1 else log_sum_exp.new_zeros
    return make(size * heads, 2, step * _aligned(-(-n // step)))


def _aligned(count: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-count // 4) * 4


def _fill_numbers(numbers: Tensor, gradient: Tensor, output: Tensor, log_sum_exp: Tensor, step: int = 1) -> None:
    """Lane by lane, if the step is more than 1: a box reads numbers that lie side by side."""
    size, heads, n, d_v = output.shape
    tiles = -(-n // NUMBER_ROWS)
    along = _aligned(-(-n // step))
    backward_numbers[(size * heads * tiles,)](
        gradient, output, log_sum_exp, numbers, *gradient.stride()[:3], *output.stride()[:3], heads, n, numbers.shape[2],
        tiles, step, along, D_V=d_v, WIDTH_V=padded(d_v), ROWS=NUMBER_ROWS,
    )  # fmt: skip


def _geometry(job: Job) -> tuple[int, int, int, int]:
    """Where a lane begins, by its number, and the step in it; and what the number moves a box's two coordinates by."""
    return job.lane_shift, job.step, *((0, 1) if job.step > 1 else (job.lane_shift, 0))


def _number_shift(job: Job, n: int) -> int:
    """How far apart the numbers of two lanes are."""
    return _aligned(n // job.step) if job.step > 1 else job.lane_shift


@lru_cache(maxsize=256)
def _first_cells(one: Pass, device: torch.device) -> Tensor:
    return torch.tensor([job.first_cell for job in one.jobs], dtype=torch.int32, device=device)


def _key_boxes(k: Tensor, v: Tensor, one: Pass) -> list[TensorDescriptor]:
    """Views for windows and for cells; where there are no cells, those for windows once more."""
    job = one.jobs[0]
    windows = [_lanes(x, job.step, TILE) for x in (k, v)]
    return [*windows, *([_cells(x, job) for x in (k, v)] if one.summary else windows)]


def _lanes(x: Tensor, step: int, rows: int) -> TensorDescriptor:
    shape = [*x.shape[:2], x.shape[2] // step, step, x.shape[3]]
    strides = [distance(x, 0), distance(x, 1), step * distance(x, 2), distance(x, 2), 1]
    return _boxes(x, shape, strides, [1, 1, rows, 1, padded(x.shape[3])])


def _cells(x: Tensor, job: Job) -> TensorDescriptor:
    together = max(1, TILE // job.cells)
    shape = [*x.shape[:2], x.shape[2] // job.block, job.block, x.shape[3]]
    strides = [distance(x, 0), distance(x, 1), job.block * distance(x, 2), distance(x, 2), 1]
    return _boxes(x, shape, strides, [1, 1, together, TILE // together, padded(x.shape[3])])


def _boxes(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    kind = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[x.dtype]
    return TensorDescriptor(x, shape, strides, box, gl.NVMMASharedLayout.get_default_for(box, kind))
