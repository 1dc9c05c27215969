"""The backend for every GPU that Triton supports, and for its interpreter: kernels in plain Triton, for any pattern.

A pass is one launch forward. Backward it is one where lanes are whole, or else one for dq and one or two for dk and dv, the
second for summary cells, which also later lanes see.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.backward import backward_dkv, backward_dq, backward_mean
from longstride.attention.kernels.call import Backward, Forward
from longstride.attention.kernels.forward import forward as forward_kernel
from longstride.attention.kernels.jobs import Pass
from longstride.attention.kernels.lanes import lane_backward, lane_forward
from longstride.attention.kernels.launch import Launch, constant
from longstride.attention.kernels.settings import LaneTiles, TileSetting, gpu, lane_tiles, padded, processors, tile_setting

MEAN_ROWS = 64
FEW = 4
"""Up to this many tiles of a window are passed over in one loop."""


def forward(call: Forward, one: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, output, _ = call.tensors
    tensors = *call.tensors, *_tables(one, q.device)
    strides = *_strides(q), *_strides(k), *_strides(v), *_strides(output)
    shape = q.shape[1], q.shape[2], len(one.jobs)
    flags = {"WIDE": _wide(q, k, v, output), "LATER": accumulate}
    whole = _whole_lanes(q, v, one, backward=False, accumulate=accumulate)
    if whole:
        flags["SAME"] = _same_rows(q, k, v, output)
        return [_lanes(lane_forward, whole, one, q, v, (*tensors, *strides, *shape), (call.scale,), flags)]
    sizes = _sizes(q, v, one, "forward", one.summary)
    tiles = one.tiles(sizes.rows)
    constants = {**_constants(q, v, one, sizes, False), "SUMMARY": one.summary, **flags, **_options(sizes)}
    programs = len(q) * len(one.jobs) * tiles
    return [Launch(forward_kernel, programs, (*tensors, *strides, *shape, tiles, call.scale), constants)]


def backward(call: Backward, one: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    inputs, tables = (q, k, v, d_output), _tables(one, q.device)
    strides = *_strides(q), *_strides(k), *_strides(v), *_strides(d_output)
    shape = q.shape[1], q.shape[2], len(one.jobs)
    flags = {"WIDE": _wide(*inputs, output, dq, dk, dv), "LATER": accumulate}
    whole = _whole_lanes(q, v, one, backward=True, accumulate=accumulate)
    if whole:
        flags["SAME"] = _same_rows(*inputs, output, dq, dk, dv)
        arguments = (
            *inputs, output, lse, dq, dk, dv, *tables, *strides, *_strides(output), *_strides(dq), *_strides(dk),
            *_strides(dv), *shape,
        )  # fmt: skip
        return [_lanes(lane_backward, whole, one, q, v, arguments, call.scales, flags)]
    launches = []
    if "mean" not in call.workspace.named:
        call.workspace.named["mean"] = call.workspace.new(*lse.shape)
        launches.append(_mean(d_output, output, call.workspace.named["mean"]))
    by_query = lse, call.workspace.named["mean"]
    if call.need_q:
        sizes = _sizes(q, v, one, "dq", one.summary)
        tiles = one.tiles(sizes.rows)
        dq_arguments = *inputs, *by_query, dq, *tables, *strides, *_strides(dq), *shape, tiles, *call.scales
        constants = {**_constants(q, v, one, sizes, False), "SUMMARY": one.summary, **flags, **_options(sizes)}
        launches.append(Launch(backward_dq, len(q) * len(one.jobs) * tiles, dq_arguments, constants))
    if call.need_kv:
        for cells in (False, True) if one.summary else (False,):
            sizes = _sizes(q, v, one, "dkv", cells)
            tiles = one.cell_tiles(sizes.columns) if cells else one.tiles(sizes.columns)
            dkv_arguments = (
                *inputs, *by_query, dk, dv, *tables, *strides, *_strides(dk), *_strides(dv), *shape, tiles, *call.scales,
            )  # fmt: skip
            flags["LATER"] = accumulate or cells
            constants = {**_constants(q, v, one, sizes, cells), "CELLS": cells, **flags, **_options(sizes)}
            launches.append(Launch(backward_dkv, len(q) * len(one.jobs) * tiles, dkv_arguments, constants))
    return launches


def _lanes(
    kernel: Any,
    sizes: LaneTiles,
    one: Pass,
    q: Tensor,
    v: Tensor,
    arguments: tuple[Any, ...],
    scales: tuple[float, ...],
    flags: dict[str, bool],
) -> Launch:
    tiles = one.lane_tiles(sizes.together)
    total = len(q) * len(one.jobs) * tiles
    constants = {
        **_dimensions(q, v),
        "ROWS": sizes.rows,
        "TOGETHER": sizes.together,
        "SHARED": one.shared,
        "GROUPED": one.grouped,
        "EXCLUDE": one.most_exclusions,
        "STAGES": sizes.stages,
        **flags,
        **_options(sizes),
    }
    programs = min(total, processors(q.device) * sizes.per_processor)
    return Launch(kernel, programs, (*arguments, tiles, total, *scales), constants)


def _mean(d_output: Tensor, output: Tensor, mean: Tensor) -> Launch:
    size, heads, n, d_v = output.shape
    tiles = -(-n // MEAN_ROWS)
    constants = {
        "D_V": d_v,
        "WIDTH_V": padded(d_v),
        "WIDE": _wide(d_output, output),
        "ROWS": MEAN_ROWS,
        "num_warps": 4,
        "num_stages": 1,
    }
    arguments = d_output, output, mean, *_strides(d_output), *_strides(output), heads, n, tiles
    return Launch(backward_mean, size * heads * tiles, arguments, constants)


def _options(sizes: TileSetting | LaneTiles) -> dict[str, int]:
    return {"num_warps": sizes.warps, "num_stages": sizes.stages}


@lru_cache(maxsize=256)
def _tables(one: Pass, device: torch.device) -> tuple[Tensor, Tensor]:
    jobs, exclusions = one.rows()
    return constant(jobs, device), constant(exclusions, device)


def _sizes(q: Tensor, v: Tensor, one: Pass, kernel: str, summary: bool) -> TileSetting:
    return tile_setting(kernel, summary, max(padded(q.shape[3]), padded(v.shape[3])), q.dtype, one.longest, gpu(q.device))


def _whole_lanes(q: Tensor, v: Tensor, one: Pass, backward: bool, accumulate: bool) -> LaneTiles | None:
    """Settings for whole lanes, where this pass has only such."""
    if one.summary:
        return None
    return lane_tiles(backward, accumulate, padded(q.shape[3]), padded(v.shape[3]), q.dtype, one.longest, gpu(q.device))


def _dimensions(q: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "D_QK": q.shape[3],
        "D_V": v.shape[3],
        "WIDTH_QK": padded(q.shape[3]),
        "WIDTH_V": padded(v.shape[3]),
        # Not tf32x3: with it backward_dkv is wrong on a GPU (Triton 3.6); docs/log.md has what was seen.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _constants(q: Tensor, v: Tensor, one: Pass, sizes: TileSetting, cells: bool) -> dict[str, Any]:
    window = max(sizes.rows, sizes.columns) + max(min(job.far, job.limit - 1) for job in one.jobs)
    return {
        **_dimensions(q, v),
        "ROWS": sizes.rows,
        "COLUMNS": sizes.columns,
        "EVEN": all(job.cells and sizes.columns % job.cells == 0 for job in one.jobs),
        "GROUPED": one.grouped,
        "SHORT": one.most_exclusions > 0 or (not cells and window <= FEW * min(sizes.rows, sizes.columns)),
        "EXCLUDE": one.most_exclusions,
    }


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _wide(*tensors: Tensor) -> bool:
    """Whether some offset inside a head does not fit into 32 bits."""
    return any(x.shape[2] * x.stride(2) >= 2**31 for x in tensors)


def _same_rows(*tensors: Tensor) -> bool:
    """Whether all have their rows at equal distances, so that one set of offsets serves them all."""
    return len({x.stride(2) for x in tensors}) == 1
