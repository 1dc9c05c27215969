"""The kernels as PyTorch operators: longstride::triton_forward and longstride::triton_backward.

Inputs are read where they lie: any strides, as long as a row's numbers are side by side. Results have the layout of the
inputs that they belong to. Each pass of `jobs.passes` is one launch forward; backward it is one where lanes are whole, or
else one for dq and one or two for dk and dv, the second for the summary cells, which also later lanes see.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import log
from typing import Any

import torch
from torch import Tensor

from longstride.attention.flops import count_flops
from longstride.attention.gradient import register_gradient
from longstride.attention.kernels.backward import backward_dkv, backward_dq, backward_mean
from longstride.attention.kernels.forward import forward
from longstride.attention.kernels.hopper.choice import Kind, choose, copyable, is_hopper
from longstride.attention.kernels.jobs import Pass, passes
from longstride.attention.kernels.lanes import lane_backward, lane_forward
from longstride.attention.kernels.settings import LaneLaunch, Launch, gpu, lane_launch, launch, padded, processors
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)
LEAST_SCALE = 1e-30
"""Stands for a scale of 0, which would make a score of -inf NaN; scores times this are 0 for all that matters."""
MEAN_ROWS = 64
FEW = 4
"""Up to this many tiles of a window are passed over in one loop."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256
LONGEST = 2**29
"""Positions, and sums of two or three of them, are 32-bit numbers in the kernels."""


def attend_triton(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, in Triton."""
    _check(q, v)
    return triton_forward(q, k, v, notation.write(heads), scale)[0]  # type: ignore[no-any-return]


def _check(q: Tensor, v: Tensor) -> None:
    elsewhere = "impl = 'blocked' takes it"
    if q.dtype not in DTYPES:
        raise ValueError(f"attend: the Triton kernels take float16, bfloat16 and float32, got {q.dtype}; {elsewhere}")
    for name, x in (("d_qk", q), ("d_v", v)):
        if x.shape[3] > WIDEST:
            raise ValueError(f"attend: the Triton kernels take {name} up to {WIDEST}, got {x.shape[3]}; {elsewhere}")
    if q.shape[2] > LONGEST:
        raise ValueError(f"attend: the Triton kernels take n up to {LONGEST:,}, got {q.shape[2]:,}; {elsewhere}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("attend: impl = 'triton' on a CPU is Triton's interpreter, which is wrong for bfloat16")


@torch.library.custom_op("longstride::triton_forward", mutates_args=())
def triton_forward(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and of every query the log-sum-exp of its scores in base 2, float32."""
    output, log_sum_exp = _forward_like(q, k, v, patterns, scale)
    q, k, v = _readable(-q if scale < 0 else q), _readable(k), _readable(v)
    wide = _wide(q, k, v, output)
    for number, one in enumerate(passes(patterns, q.shape[2])):
        tensors = q, k, v, output, log_sum_exp, *_tables(one, q.device)
        strides = *_strides(q), *_strides(k), *_strides(v), *_strides(output)
        shape = q.shape[1], q.shape[2], len(one.jobs)
        bits = max(abs(scale), LEAST_SCALE) * LOG2_E
        kind = _for_hopper(one, False, number > 0, q, k, v, output)
        whole = _whole_lanes(q, v, one, backward=False, later=number > 0)
        if kind:
            _hopper().forward(kind, q, k, v, output, log_sum_exp, one, bits, number > 0)
        elif whole:
            _run_lanes(
                lane_forward, whole, one, q, v, *tensors, *strides, *shape, scales=(bits,),
                SAME=_same_rows(q, k, v, output), WIDE=wide, LATER=number > 0,
            )  # fmt: skip
        else:
            sizes = _sizes(q, v, one, "forward", one.summary)
            tiles = one.tiles(sizes.rows)
            _run(
                forward, len(q) * len(one.jobs) * tiles, sizes, q.device, *tensors, *strides, *shape, tiles, bits,
                **_constants(q, v, one, sizes, False), SUMMARY=one.summary, WIDE=wide, LATER=number > 0,
            )  # fmt: skip
    return output, log_sum_exp


@torch.library.custom_op("longstride::triton_backward", mutates_args=())
def triton_backward(
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
    results: tuple[Tensor, Tensor, Tensor] = _backward_like(gradient, q, k, v, output, log_sum_exp, patterns, scale, needed)
    need_q, need_keys = needed[0], needed[1] or needed[2]
    dq, dk, dv = (x if x.shape == like.shape else torch.empty_like(like) for x, like in zip(results, (q, k, v)))
    size, heads, n, _ = q.shape
    gradient = _readable(gradient)
    q, k, v = _readable(-q if scale < 0 else q), _readable(k), _readable(v)
    scales = max(abs(scale), LEAST_SCALE) * LOG2_E, abs(scale)
    mean = None
    wide = _wide(q, k, v, gradient, output, dq, dk, dv)
    for number, one in enumerate(passes(patterns, n)):
        inputs, tables = (q, k, v, gradient), _tables(one, q.device)
        strides = *_strides(q), *_strides(k), *_strides(v), *_strides(gradient)
        shape = heads, n, len(one.jobs)
        kind = _for_hopper(one, True, number > 0, q, k, v, gradient, output, dq, dk, dv)
        if kind:
            _hopper().backward(
                kind, *inputs, output, log_sum_exp, dq, dk, dv, one, scales, number > 0, (need_q, need_keys)
            )  # fmt: skip
            continue
        whole = _whole_lanes(q, v, one, backward=True, later=number > 0)
        if whole:
            _run_lanes(
                lane_backward, whole, one, q, v, *inputs, output, log_sum_exp, dq, dk, dv, *tables, *strides,
                *_strides(output), *_strides(dq), *_strides(dk), *_strides(dv), *shape, scales=scales,
                SAME=_same_rows(q, k, v, gradient, output, dq, dk, dv), WIDE=wide, LATER=number > 0,
            )  # fmt: skip
            continue
        if mean is None:
            mean = _mean(gradient, output, log_sum_exp)
        by_query = log_sum_exp, mean
        if need_q:
            sizes = _sizes(q, v, one, "dq", one.summary)
            tiles = one.tiles(sizes.rows)
            _run(
                backward_dq, size * len(one.jobs) * tiles, sizes, q.device,
                *inputs, *by_query, dq, *tables, *strides, *_strides(dq), *shape, tiles, *scales,
                **_constants(q, v, one, sizes, False), SUMMARY=one.summary, WIDE=wide, LATER=number > 0,
            )  # fmt: skip
        if need_keys:
            for cells in (False, True) if one.summary else (False,):
                sizes = _sizes(q, v, one, "dkv", cells)
                tiles = one.cell_tiles(sizes.columns) if cells else one.tiles(sizes.columns)
                _run(
                    backward_dkv, size * len(one.jobs) * tiles, sizes, q.device,
                    *inputs, *by_query, dk, dv, *tables, *strides, *_strides(dk), *_strides(dv), *shape, tiles, *scales,
                    **_constants(q, v, one, sizes, cells), CELLS=cells, WIDE=wide, LATER=number > 0 or cells,
                )  # fmt: skip
    if scale < 0:
        dq.neg_()
    return results


def _for_hopper(one: Pass, backward: bool, later: bool, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Kind | None:
    """Which of Hopper's own kernels takes a pass, if one does."""
    if not is_hopper(q.device) or not copyable(q, k, v, *others):
        return None
    _, heads, n, d_qk = q.shape
    return choose(one, backward, later, heads, n, d_qk, v.shape[3])


def _hopper() -> Any:
    # Imported when it is used: other GPUs do not need Triton's lower level, and not every version has it.
    from longstride.attention.kernels.hopper import launch

    return launch


def _run(
    kernel: Any, programs: int, sizes: Launch | LaneLaunch, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    if programs:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            kernel[(programs,)](*arguments, **constants, num_warps=sizes.warps, num_stages=sizes.stages)


def _run_lanes(
    kernel: Any,
    sizes: LaneLaunch,
    one: Pass,
    q: Tensor,
    v: Tensor,
    *arguments: Any,
    scales: tuple[float, ...],
    **flags: bool,
) -> None:
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
    }
    programs = min(total, processors(q.device) * sizes.per_processor)
    _run(kernel, programs, sizes, q.device, *arguments, tiles, total, *scales, **constants)


def _mean(gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Tensor:
    mean = torch.empty_like(log_sum_exp)
    size, heads, n, _ = output.shape
    tiles = -(-n // MEAN_ROWS)
    _run(
        backward_mean, size * heads * tiles, Launch(MEAN_ROWS, 0, 4, 1), output.device,
        gradient, output, mean, *_strides(gradient), *_strides(output), heads, n, tiles,
        D_V=output.shape[3], WIDTH_V=padded(output.shape[3]), WIDE=_wide(gradient, output), ROWS=MEAN_ROWS,
    )  # fmt: skip
    return mean


@lru_cache(maxsize=256)
def _tables(one: Pass, device: torch.device) -> tuple[Tensor, Tensor]:
    return one.tables(device)


def _sizes(q: Tensor, v: Tensor, one: Pass, kernel: str, summary: bool) -> Launch:
    return launch(kernel, summary, max(padded(q.shape[3]), padded(v.shape[3])), q.dtype, one.longest, gpu(q.device))


def _whole_lanes(q: Tensor, v: Tensor, one: Pass, backward: bool, later: bool) -> LaneLaunch | None:
    """Settings for whole lanes, where this pass has only such."""
    if one.summary:
        return None
    return lane_launch(backward, later, padded(q.shape[3]), padded(v.shape[3]), q.dtype, one.longest, gpu(q.device))


def _dimensions(q: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "D_QK": q.shape[3],
        "D_V": v.shape[3],
        "WIDTH_QK": padded(q.shape[3]),
        "WIDTH_V": padded(v.shape[3]),
        # Not tf32x3: with it backward_dkv is wrong on a GPU (Triton 3.6); docs/log.md has what was seen.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _constants(q: Tensor, v: Tensor, one: Pass, sizes: Launch, cells: bool) -> dict[str, Any]:
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


def _readable(x: Tensor) -> Tensor:
    """x with its rows' numbers side by side: itself, unless it comes as a rare kind of view."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


@triton_forward.register_fake
def _forward_like(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
    return _result_like(v), v.new_empty(v.shape[:-1], dtype=torch.float32)


@triton_backward.register_fake
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
    like_q, like_k, like_v = (_result_like(x) if wanted else x.new_empty(0) for x, wanted in zip((q, k, v), needed))
    return like_q, like_k, like_v


def _result_like(x: Tensor) -> Tensor:
    """Memory for a result in x's own order of dimensions, [batch, n, heads, d] for what the projections leave."""
    if x.stride(1) < x.stride(2):
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return x.new_empty(x.shape)


register_gradient(triton_forward, triton_backward, "triton")
count_flops(torch.ops.longstride.triton_forward, torch.ops.longstride.triton_backward)
