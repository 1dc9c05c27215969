"""The backend for every GPU that Triton supports, and for its interpreter: kernels in plain Triton, for any pattern.

Forward, a pass is one launch. Backward, it is one launch if a tile holds whole lanes. Otherwise it is one for dq, and one or
two for dk and dv: the second is for summary cells, which later lanes see too. `backward_delta` runs once, before these. With
documents (`work.py`), tables say which tile a program computes.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.arguments import (
    Gradients,
    Sizes,
    Tables,
    Tiling,
    compiled,
    dims,
    matrix,
    row_shape,
    row_sizes,
)
from longstride.attention.kernels.backward import Queries, backward_delta, backward_dkv, backward_dq
from longstride.attention.kernels.call import Backward, Forward, has_only_documents, matrices_of
from longstride.attention.kernels.forward import forward as forward_kernel
from longstride.attention.kernels.jobs import Pass
from longstride.attention.kernels.lanes import lane_backward, lane_forward
from longstride.attention.kernels.launch import Launch, constant
from longstride.attention.kernels.saved import Setting
from longstride.attention.kernels.settings import gpu, lane_setting, padded, processors, tile_setting
from longstride.attention.kernels.work import cell_items, lane_items, tile_items

DELTA_ROWS = 64
"""Rows per program of `backward_delta`."""
FEW = 4
"""A window of at most this many tiles takes one loop, with a mask on each tile. Longer ones have one without masks, too."""


def forward(call: Forward, pass_: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, output, lse = call.tensors
    arguments = *map(matrix, (q, k, v, output)), lse, _tables(pass_, q.device), call.scale
    whole = _whole_lanes(call, pass_, "lane_forward", accumulate)
    if whole:
        return [_launch(lane_forward, call, pass_, whole, arguments, ACCUMULATE=accumulate)]
    setting = _setting(call, pass_, "forward", pass_.summary)
    return [_launch(forward_kernel, call, pass_, setting, arguments, ACCUMULATE=accumulate)]


def backward(call: Backward, pass_: Pass, accumulate: bool) -> list[Launch]:
    q, k, v, d_output, output, lse, dq, dk, dv = call.tensors
    rest = _tables(pass_, q.device), call.scales
    whole = _whole_lanes(call, pass_, "lane_backward", accumulate)
    if whole:
        gradients = Gradients(*map(matrix, (dq, dk, dv)))
        arguments = *map(matrix, (q, k, v, d_output, output)), lse, gradients, *rest
        return [_launch(lane_backward, call, pass_, whole, arguments, ACCUMULATE=accumulate)]
    launches = []
    if "delta" not in call.workspace.named:
        call.workspace.named["delta"] = call.workspace.new(*lse.shape)
        launches.append(_delta(call, call.workspace.named["delta"]))
    queries = Queries(matrix(q), matrix(d_output), lse, call.workspace.named["delta"])
    inputs = queries, matrix(k), matrix(v)
    if call.need_q:
        setting = _setting(call, pass_, "dq", pass_.summary)
        launches.append(_launch(backward_dq, call, pass_, setting, (*inputs, matrix(dq), *rest), ACCUMULATE=accumulate))
    if call.need_kv:
        group = q.shape[1] // k.shape[1]
        for number in range(group):  # Heads that share keys take turns, so that each dk and dv has one writer at a time.
            launches += _dkv(call, pass_ if group == 1 else pass_.member(number, group), inputs, accumulate or number > 0)
    return launches


def _dkv(call: Backward, pass_: Pass, inputs: tuple[Any, ...], accumulate: bool) -> list[Launch]:
    if not pass_.jobs:
        return []
    launches = []
    arguments = *inputs, matrix(call.dk), matrix(call.dv), _tables(pass_, call.q.device), call.scales
    for cells in (False, True) if pass_.summary else (False,):
        setting = _setting(call, pass_, "dkv", cells)
        flags = {"CELLS": cells, "ACCUMULATE": accumulate or cells}
        launches.append(_launch(backward_dkv, call, pass_, setting, arguments, **flags))
    return launches


def _launch(
    kernel: Any, call: Forward | Backward, pass_: Pass, setting: Setting, arguments: tuple[Any, ...], **flags: bool
) -> Launch:  # fmt: skip
    rows, columns, warps, stages, per_processor = setting
    device, (batch, heads, n, _) = call.q.device, call.q.shape
    matrices = matrices_of(call)
    window = max(rows, columns) + max(min(job.far, job.limit - 1) for job in pass_.jobs)
    of_lanes: dict[str, Any] = {}
    if kernel in (lane_forward, lane_backward):
        # With documents it differs from tile to tile: `work.LaneWork` has it.
        together = rows // padded(pass_.longest, least=1) if call.layout is None else 1
        same = len({x.stride(2) for x in matrices}) == 1
        of_lanes = {"together": together, "shared": pass_.shared, "same": same, "stages": stages}
        tiles, items_of = pass_.lane_tiles(together), partial(lane_items, size=rows, accumulate=flags["ACCUMULATE"])
    elif flags.get("CELLS"):
        tiles, items_of = pass_.cell_tiles(columns), partial(cell_items, size=columns)
    else:
        of_keys = kernel is backward_dkv
        size = columns if of_keys else rows
        accumulate = flags["ACCUMULATE"]
        tiles, items_of = pass_.tiles(size), partial(tile_items, size=size, accumulate=accumulate, of_keys=of_keys)
    total = batch * len(pass_.jobs) * tiles
    documents = call.layout.documents if call.layout else None
    if documents is not None:
        items = items_of(pass_, documents)
        tiles, total = len(items), documents.repeats * len(items)
        extra = {"work": constant(items, device), "documents": constant(documents.rows, device)}
        arguments = tuple(x._replace(**extra) if isinstance(x, Tables) else x for x in arguments)
    tiling = compiled(
        Tiling,
        rows=rows,
        columns=columns,
        summary=pass_.summary,
        even=all(job.cells and columns % job.cells == 0 for job in pass_.jobs),
        by_block=pass_.by_block,
        short=pass_.most_exclusions > 0 or (not flags.get("CELLS") and window <= FEW * min(rows, columns)),
        exclude=pass_.most_exclusions,
        group=heads // call.k.shape[1],
        varied=documents is not None,
        **of_lanes,
    )
    constants = {"DIMS": dims(call.q, call.v, _wide(*matrices)), "TILES": tiling, **flags}
    arguments = *arguments, Sizes(heads, n, len(pass_.jobs), tiles, total)
    programs = min(total, processors(device) * per_processor) if per_processor else total
    return Launch(kernel, programs, arguments, {**constants, "num_warps": warps, "num_stages": stages})


def _delta(call: Backward, delta: Tensor) -> Launch:
    d_output, output = call.d_output, call.output
    sizes = row_sizes(output, DELTA_ROWS)
    row = row_shape(output, _wide(d_output, output))
    constants = {"ROW": row, "ROWS": DELTA_ROWS, "num_warps": 4, "num_stages": 1}
    d_lse = call.layout.d_lse if call.layout else None
    return Launch(backward_delta, sizes.total, (matrix(d_output), matrix(output), d_lse, delta, sizes), constants)


@lru_cache(maxsize=256)
def _tables(pass_: Pass, device: torch.device) -> Tables:
    jobs, exclusions = pass_.rows()
    return Tables(constant(jobs, device), constant(exclusions, device))


def _setting(call: Forward | Backward, pass_: Pass, kernel: str, summary: bool) -> Setting:
    width = max(padded(call.q.shape[3]), padded(call.v.shape[3]))
    return tile_setting(kernel, summary, width, call.q.dtype, pass_.longest, gpu(call.q.device))


def _whole_lanes(call: Forward | Backward, pass_: Pass, kernel: str, accumulate: bool) -> Setting | None:
    """Returns the settings for tiles that hold whole lanes; None if this pass needs other tiles."""
    # Of residue classes, a short document has many short ones. The kernels know nothing else that is not plain.
    of_documents = has_only_documents(call) and all(job.index_stride > 1 for job in pass_.jobs)
    if pass_.summary or not (call.layout is None or of_documents):
        return None
    widths = padded(call.q.shape[3]), padded(call.v.shape[3])
    return lane_setting(kernel, accumulate, *widths, call.q.dtype, pass_.longest, gpu(call.q.device))


def _wide(*tensors: Tensor) -> bool:
    """Whether an offset inside a head may not fit into 32 bits. Positions of queries count from that of the first key."""
    return max(x.shape[2] for x in tensors) * max(x.stride(2) for x in tensors) >= 2**31
