"""The backend for every GPU that Triton supports, and for its interpreter: kernels in plain Triton, for any pattern.

Forward, a pass is one launch. Backward, it is one launch if a tile holds whole lanes. Otherwise it is one for dq, and one or
two for dk and dv: the second is for summary cells, which later lanes see too. `backward_delta` runs once, before these.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.arguments import (
    Dims,
    LaneTiling,
    Sizes,
    Tables,
    Tiling,
    compiled,
    dims,
    matrix,
    row_shape,
    row_sizes,
)
from longstride.attention.kernels.backward import backward_delta, backward_dkv, backward_dq
from longstride.attention.kernels.call import Backward, Forward
from longstride.attention.kernels.forward import forward as forward_kernel
from longstride.attention.kernels.jobs import Pass
from longstride.attention.kernels.lanes import lane_backward, lane_forward
from longstride.attention.kernels.launch import Launch, constant
from longstride.attention.kernels.saved import Setting
from longstride.attention.kernels.settings import gpu, lane_setting, padded, processors, tile_setting

DELTA_ROWS = 64
"""Rows per program of `backward_delta`."""
FEW = 4
"""A window of at most this many tiles takes one loop, with a mask on each tile. Longer ones also have a loop without."""


def forward(call: Forward, one: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, output, lse = call.tensors
    arguments = *map(matrix, (q, k, v, output)), lse, _tables(one, q.device), call.scale
    whole = _whole_lanes(call, one, "lane_forward", accumulate)
    if whole:
        return [_launch_lanes(lane_forward, call, one, whole, arguments, accumulate)]
    setting = _setting(call, one, "forward", one.summary)
    return [_launch(forward_kernel, call, one, setting, one.tiles(setting.rows), arguments, ACCUMULATE=accumulate)]


def backward(call: Backward, one: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    inputs: tuple[Any, ...] = tuple(map(matrix, (q, k, v, d_output)))
    rest = _tables(one, q.device), *call.scales
    whole = _whole_lanes(call, one, "lane_backward", accumulate)
    if whole:
        arguments = *inputs, matrix(output), lse, *map(matrix, (dq, dk, dv)), *rest
        return [_launch_lanes(lane_backward, call, one, whole, arguments, accumulate)]
    launches = []
    if "delta" not in call.workspace.named:
        call.workspace.named["delta"] = call.workspace.new(*lse.shape)
        launches.append(_delta(d_output, output, call.workspace.named["delta"]))
    inputs = *inputs, lse, call.workspace.named["delta"]
    if call.need_q:
        setting = _setting(call, one, "dq", one.summary)
        arguments = *inputs, matrix(dq), *rest
        launches.append(_launch(backward_dq, call, one, setting, one.tiles(setting.rows), arguments, ACCUMULATE=accumulate))
    if call.need_kv:
        arguments = *inputs, matrix(dk), matrix(dv), *rest
        for cells in (False, True) if one.summary else (False,):
            setting = _setting(call, one, "dkv", cells)
            tiles = (one.cell_tiles if cells else one.tiles)(setting.columns)
            flags = {"CELLS": cells, "ACCUMULATE": accumulate or cells}
            launches.append(_launch(backward_dkv, call, one, setting, tiles, arguments, **flags))
    return launches


def _launch(
    kernel: Any,
    call: Forward | Backward,
    one: Pass,
    setting: Setting,
    tiles: int,
    arguments: tuple[Any, ...],
    **flags: bool,
) -> Launch:
    rows, columns = setting.rows, setting.columns
    window = max(rows, columns) + max(min(job.far, job.limit - 1) for job in one.jobs)
    tiling = compiled(
        Tiling,
        rows=rows,
        columns=columns,
        summary=one.summary,
        even=all(job.cells and columns % job.cells == 0 for job in one.jobs),
        grouped=one.grouped,
        short=one.most_exclusions > 0 or (not flags.get("CELLS") and window <= FEW * min(rows, columns)),
        exclude=one.most_exclusions,
    )
    constants = {"DIMS": _dims(call), "TILES": tiling, **flags, **_options(setting)}
    sizes = _sizes(call, one, tiles)
    return Launch(kernel, sizes.total, (*arguments, sizes), constants)


def _launch_lanes(
    kernel: Any,
    call: Forward | Backward,
    one: Pass,
    setting: Setting,
    arguments: tuple[Any, ...],
    accumulate: bool,
) -> Launch:
    together = setting.rows // padded(one.longest, least=1)
    tiling = compiled(
        LaneTiling,
        rows=setting.rows,
        together=together,
        shared=one.shared,
        same=len({x.stride(2) for x in _matrices(call)}) == 1,
        grouped=one.grouped,
        exclude=one.most_exclusions,
        stages=setting.stages,
    )
    constants = {"DIMS": _dims(call), "TILES": tiling, "ACCUMULATE": accumulate, **_options(setting)}
    sizes = _sizes(call, one, one.lane_tiles(together))
    programs = min(sizes.total, processors(call.q.device) * setting.per_processor)
    return Launch(kernel, programs, (*arguments, sizes), constants)


def _delta(d_output: Tensor, output: Tensor, delta: Tensor) -> Launch:
    sizes = row_sizes(output, DELTA_ROWS)
    row = row_shape(output, _wide(d_output, output))
    constants = {"ROW": row, "ROWS": DELTA_ROWS, "num_warps": 4, "num_stages": 1}
    return Launch(backward_delta, sizes.total, (matrix(d_output), matrix(output), delta, sizes), constants)


def _sizes(call: Forward | Backward, one: Pass, tiles: int) -> Sizes:
    batch, heads, n, _ = call.q.shape
    return Sizes(heads, n, len(one.jobs), tiles, batch * len(one.jobs) * tiles)


def _options(setting: Setting) -> dict[str, int]:
    return {"num_warps": setting.warps, "num_stages": setting.stages}


@lru_cache(maxsize=256)
def _tables(one: Pass, device: torch.device) -> Tables:
    jobs, exclusions = one.rows()
    return Tables(constant(jobs, device), constant(exclusions, device))


def _widths(call: Forward | Backward) -> tuple[int, int]:
    return padded(call.q.shape[3]), padded(call.v.shape[3])


def _setting(call: Forward | Backward, one: Pass, kernel: str, summary: bool) -> Setting:
    return tile_setting(kernel, summary, max(_widths(call)), call.q.dtype, one.longest, gpu(call.q.device))


def _whole_lanes(call: Forward | Backward, one: Pass, kernel: str, accumulate: bool) -> Setting | None:
    """Returns the settings for tiles that hold whole lanes; None if this pass needs other tiles."""
    if one.summary:
        return None
    return lane_setting(kernel, accumulate, *_widths(call), call.q.dtype, one.longest, gpu(call.q.device))


def _dims(call: Forward | Backward) -> Dims:
    wide = _wide(*_matrices(call))
    # Not tf32x3: with it backward_dkv is wrong on a GPU (Triton 3.6); docs/log.md has what was seen.
    precision = "ieee" if call.q.dtype == torch.float32 else "tf32"
    return dims(call.q, call.v, wide, precision)


def _matrices(call: Forward | Backward) -> list[Tensor]:
    return [x for x in call.tensors if x.dim() == 4]


def _wide(*tensors: Tensor) -> bool:
    """Whether an offset inside a head may not fit into 32 bits."""
    return any(x.shape[2] * x.stride(2) >= 2**31 for x in tensors)
