"""Triton kernels for what lies between the matrix products of a block: additions to the stream, norms and gelu.

Each reads and writes every tensor once. Rows are positions of all sequences, and the last dimension is contiguous. Whatever
is summed over the rows (gradients of biases and of a norm's weights) is summed in float32: each program adds up its own rows
and writes one row of partial sums, and `sum_rows` adds those in a fixed order. Results are therefore the same in every run.

A norm without weight and bias is an RMS norm, which has no mean either.
"""

# mypy: ignore-errors
# Triton compiles a part of this file: its arguments have Triton's types, not Python's.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.attention.kernels.launch import Launch, Plan, Workspace, capture_safe, plan_for
from longstride.model.dropout_kernel import draw_numbers

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 8192
"""Largest row that a program of the norm kernels holds."""
ALIGNMENT = 15
"""The bits of an address that are 0 if it is a multiple of 16 bytes."""


class Setting(NamedTuple):
    """How a kernel's programs share the work."""

    elements: int
    """Of a program at a time; at least a row for the norm kernels."""
    warps: int
    per_processor: int = 0
    """Programs on a multiprocessor, for kernels that loop over rows; fewer where a program has more warps."""


SETTINGS = {
    "forward": Setting(2048, 2),
    "backward": Setting(1024, 2, 6),
    "backward with dropout": Setting(512, 1, 12),
    "sum": Setting(4096, 8, 2),
    "gelu": Setting(4096, 4),
    "gelu_backward": Setting(2048, 4, 4),
}
"""The fastest of those that were measured on an H200, for rows of 256 and 512."""
GELU_COLUMNS = 256
SUM_ROWS, SUM_COLUMNS = 512, 8
"""Partial sums that a program of `sum_rows` adds up at a time."""


def takes(x: Tensor, whole_rows: bool = True) -> bool:
    """Whether the kernels take a tensor with this dtype and these rows. `whole_rows`: a program holds whole rows."""
    width = x.shape[-1]
    return x.dtype in DTYPES and x.numel() > 0 and (not whole_rows or (width <= WIDEST and width % 4 == 0))


def add_norm(
    stream: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, keep: float, epsilon: float, results: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Fills the results: stream + dropout(branch + branch_bias), its norm, and each row's mean, None of an RMS norm, and
    scale. Without a branch there is no first result, and the stream itself is normalized."""
    _forward(stream, branch, branch_bias, weight, bias, seed, keep, epsilon, results)


def add(
    stream: Tensor, branch: Tensor, branch_bias: Tensor | None, seed: Tensor | None, keep: float, result: Tensor
) -> None:
    """Fills the result: stream + dropout(branch + branch_bias)."""
    _forward(stream, branch, branch_bias, None, None, seed, keep, 0.0, (result, None, None, None))


def _forward(stream, branch, branch_bias, weight, bias, seed, keep, epsilon, results) -> None:
    width, setting = stream.shape[-1], SETTINGS["forward"]
    rows, block = stream.numel() // width, triton.next_power_of_2(width)
    together, warps = _tile(block, setting)

    def launches(tensors, workspace):
        stream, branch, branch_bias, weight, bias, seed, *results = tensors
        values = rows, keep, epsilon, width, block, together
        arguments = stream, branch, branch_bias, weight, bias, seed, *results, *values
        return [Launch(forward, triton.cdiv(rows, together), arguments, {"num_warps": warps})]

    run_plan(
        ("forward", setting, rows, width, keep, epsilon),
        [stream, branch, branch_bias, weight, bias, seed, *results],
        launches,
    )


def add_norm_backward(
    d_stream: Tensor, d_normalized: Tensor | None, stream: Tensor | None, weight: Tensor | None, mean: Tensor | None,
    scale: Tensor | None, seed: Tensor | None, keep: float, d_previous: Tensor | None, d_branch: Tensor | None, sums: Tensor,
) -> None:  # fmt: skip
    """Fills the gradients of the stream and of the branch, and sums over the rows [0 to 3, width]: the gradients of a layer
    norm's weight and bias, and of the branch's bias if its row is there.

    `stream`: the sum that was normalized. Without a seed the branch's gradient is the stream's, and `d_branch` is None."""
    _backward(d_stream, d_normalized, stream, weight, mean, scale, seed, keep, d_previous, d_branch, sums)


def add_backward(d_stream: Tensor, seed: Tensor | None, keep: float, d_branch: Tensor | None, sums: Tensor) -> None:
    """Fills the gradient of the branch, None without a seed, and its sum over the rows [1, width]."""
    _backward(d_stream, None, None, None, None, None, seed, keep, None, d_branch, sums)


def _backward(d_stream, d_normalized, stream, weight, mean, scale, seed, keep, d_previous, d_branch, sums) -> None:
    width, name = d_stream.shape[-1], "backward" if seed is None else "backward with dropout"
    setting = SETTINGS["sum" if seed is None and d_normalized is None else name]
    rows, block = d_stream.numel() // width, triton.next_power_of_2(width)
    together, warps = _tile(block, setting)
    per_processor = max(1, setting.per_processor * setting.warps // warps)
    programs = min(triton.cdiv(rows, together), per_processor * _processors(d_stream.device))

    def launches(tensors, workspace):
        *inputs, d_previous, d_branch, sums = tensors
        partial = workspace.new(programs, *sums.shape) if len(sums) else None
        arguments = *inputs, d_previous, d_branch, partial, rows, keep, width, block, together, len(sums)
        launch = Launch(backward, programs, arguments, {"num_warps": warps})
        return [launch] if partial is None else [launch, launch_sum_rows(partial, sums, programs)]

    tensors = [d_stream, d_normalized, stream, weight, mean, scale, seed, d_previous, d_branch, sums]
    run_plan(("backward", setting, rows, width, keep, len(sums)), tensors, launches)


def gelu(x: Tensor, bias: Tensor | None, result: Tensor) -> None:
    """Fills the result: (x + bias) * sigmoid(1.702 (x + bias))."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    setting = SETTINGS["gelu"]
    together, columns, warps = _gelu_tile(width, setting)
    programs = triton.cdiv(rows, together) * triton.cdiv(width, columns)

    def launches(tensors, workspace):
        return [Launch(gelu_forward, programs, (*tensors, rows, width, together, columns), {"num_warps": warps})]

    run_plan(("gelu", setting, rows, width), [x, bias, result], launches)


def gelu_gradient(d_result: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, d_bias: Tensor | None) -> None:
    """Fills dx, and d_bias, its sum over the rows, if there is a bias."""
    rows, width, setting = x.numel() // x.shape[-1], x.shape[-1], SETTINGS["gelu_backward"]
    together, columns, warps = _gelu_tile(width, setting)
    parts = triton.cdiv(width, columns)
    groups = min(triton.cdiv(rows, together), max(1, setting.per_processor * _processors(x.device) // parts))

    def launches(tensors, workspace):
        *tensors, d_bias = tensors
        partial = None if d_bias is None else workspace.new(groups, width)
        arguments = *tensors, partial, rows, groups, width, together, columns
        launch = Launch(gelu_backward, parts * groups, arguments, {"num_warps": warps})
        return [launch] if d_bias is None else [launch, launch_sum_rows(partial, d_bias, groups)]

    run_plan(("gelu_backward", setting, rows, width), [d_result, x, bias, dx, d_bias], launches)


def _tile(block: int, setting: Setting) -> tuple[int, int]:
    """Returns the rows of a tile and the warps of a program, which has as many more as a row has more elements."""
    rows = max(1, setting.elements // block)
    return rows, min(16, setting.warps * max(1, rows * block // setting.elements))


def _gelu_tile(width: int, setting: Setting) -> tuple[int, int, int]:
    columns = min(GELU_COLUMNS, triton.next_power_of_2(width))
    return setting.elements // columns, columns, setting.warps


def launch_sum_rows(partial: Tensor, sums: Tensor, rows: int) -> Launch:
    columns = sums.numel()
    together = min(SUM_ROWS, triton.next_power_of_2(rows))
    arguments = partial, sums, rows, columns, together, SUM_COLUMNS
    return Launch(sum_rows, triton.cdiv(columns, SUM_COLUMNS), arguments, {"num_warps": 8})


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def run_plan(key: tuple, tensors: list[Tensor | None], launches: Callable) -> None:
    """Runs the plan of these tensors; `key` and the tensors' dtypes determine its launches. Results are contiguous; of what
    is not, such as a parametrized weight, the kernels get a copy."""
    tensors = [None if x is None else x.contiguous() for x in tensors]
    there = [x for x in tensors if x is not None]
    # The kernels assume nothing of a seed's address.
    aligned = not any(x.data_ptr() & ALIGNMENT for x in there if x.dtype != torch.int64)

    def make() -> Plan:
        with capture_safe(there[0].is_cuda):
            distinct = [None if x is None else x.detach() for x in tensors]
            workspace = Workspace(there[0].device)
            return Plan(launches(distinct, workspace), [x for x in distinct if x is not None], workspace, aligned)

    dtypes = tuple(None if x is None else x.dtype for x in tensors)
    plan_for((*key, aligned, there[0].device, dtypes), make).run(there)


@triton.jit(do_not_specialize_on_alignment=["seed"])
def forward(
    stream, branch, branch_bias, weight, bias, seed, new_stream, normalized, mean, scale, rows, keep, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(stream + place, inside, 0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + place, inside, 0.0).to(tl.float32)
        if branch_bias is not None:
            added += tl.load(branch_bias + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
        if seed is not None:
            added = drop(added, seed, row, keep, WIDTH, BLOCK)
        x = (x + added).to(new_stream.dtype.element_ty)
        tl.store(new_stream + place, x, inside)
        x = x.to(tl.float32)
    if normalized is not None:
        if weight is not None:
            row_mean = tl.sum(x, 1) / WIDTH
            x = tl.where((column < WIDTH)[None, :], x - row_mean[:, None], 0.0)
        row_scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
        if weight is not None:
            factor = tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
            shift = tl.load(bias + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
            tl.store(normalized + place, x * row_scale[:, None] * factor + shift, inside)
            tl.store(mean + row, row_mean, row < rows)
        else:
            tl.store(normalized + place, x * row_scale[:, None], inside)
        tl.store(scale + row, row_scale, row < rows)


@triton.jit(do_not_specialize_on_alignment=["seed"])
def backward(
    d_stream, d_normalized, stream, weight, mean, scale, seed, d_previous, d_branch, partial, rows, keep,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """With x the row that was normalized, y = (x - mean) * scale and g = d_normalized * weight:
    dx = scale * (g - average(g) - y * average(g * y)).
    An RMS norm has y = x * scale and g = d_normalized, and its dx has no average(g).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    if weight is not None:
        factor = tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
        weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_branch: tl.constexpr = SUMS % 2 == 1  # A layer norm has two sums.
    branch_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    # The next tile is loaded before the current one is computed.
    loaded = load_rows(d_stream, d_normalized, stream, mean, scale, program, rows, WIDTH, BLOCK, ROWS)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        d_sum, d_y, x, row_mean, row_scale = loaded
        loaded = load_rows(d_stream, d_normalized, stream, mean, scale, tile + programs, rows, WIDTH, BLOCK, ROWS)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        slope = d_sum.to(tl.float32)
        if d_normalized is not None:
            d_y, y = d_y.to(tl.float32), x.to(tl.float32)
            if weight is not None:
                y = tl.where(inside, (y - row_mean[:, None]) * row_scale[:, None], 0.0)
                g = d_y * factor
                average, average_y = tl.sum(g, 1) / WIDTH, tl.sum(g * y, 1) / WIDTH
                slope += row_scale[:, None] * (g - average[:, None] - y * average_y[:, None])
            else:
                y *= row_scale[:, None]
                average_y = tl.sum(d_y * y, 1) / WIDTH
                slope += row_scale[:, None] * (d_y - y * average_y[:, None])
            tl.store(d_previous + place, slope, inside)
            if weight is not None:
                weight_sum += d_y * y
                bias_sum += d_y
        if seed is not None:
            slope = drop(slope, seed, row, keep, WIDTH, BLOCK)
            tl.store(d_branch + place, slope, inside)
        if sum_branch:
            branch_sum += tl.where(inside, slope, 0.0)
    if partial is not None:
        place = partial + program * SUMS * WIDTH + column
        if weight is not None:
            tl.store(place, tl.sum(weight_sum, 0), column < WIDTH)
            tl.store(place + WIDTH, tl.sum(bias_sum, 0), column < WIDTH)
        if sum_branch:
            tl.store(place + (SUMS - 1) * WIDTH, tl.sum(branch_sum, 0), column < WIDTH)


@triton.jit
def load_rows(
    d_stream, d_normalized, stream, mean, scale, tile, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    d_sum = tl.load(d_stream + place, inside, 0.0)
    d_y, x, row_mean, row_scale = d_sum, d_sum, 0.0, 0.0
    if d_normalized is not None:
        d_y = tl.load(d_normalized + place, inside, 0.0)
        x = tl.load(stream + place, inside, 0.0)
        if mean is not None:
            row_mean = tl.load(mean + row, row < rows, 0.0)
        row_scale = tl.load(scale + row, row < rows, 0.0)
    return d_sum, d_y, x, row_mean, row_scale


@triton.jit
def drop(x, seed, row, keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Dropout of rows [rows, BLOCK], with the mask that `dropout_kernel.fill_mask` draws for the whole tensor."""
    counters = row.to(tl.uint32)[:, None] * (WIDTH // 4) + tl.arange(0, BLOCK // 4)[None, :]
    return tl.where(draw_numbers(seed, counters) < keep, x / keep, 0.0)


@triton.jit
def gelu_forward(x, bias, result, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    parts: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
    tl.store(result + place, value * tl.sigmoid(1.702 * value), inside)


@triton.jit
def gelu_backward(
    d_result, x, bias, dx, partial, rows, groups, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    parts: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, column < WIDTH, 0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    row = group * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value, slope = tl.load(x + place, inside, 0.0), tl.load(d_result + place, inside, 0.0)
    for _ in range(group, tl.cdiv(rows, ROWS), groups):
        later = row + groups * ROWS
        later_inside = (later < rows)[:, None] & (column < WIDTH)[None, :]
        later_place = later.to(tl.int64)[:, None] * WIDTH + column[None, :]
        later_value = tl.load(x + later_place, later_inside, 0.0)
        later_slope = tl.load(d_result + later_place, later_inside, 0.0)
        shifted = value.to(tl.float32) + shift[None, :]
        gate = tl.sigmoid(1.702 * shifted)
        slope = slope.to(tl.float32) * (gate + 1.702 * shifted * gate * (1 - gate))
        tl.store(dx + place, slope, inside)
        if partial is not None:
            total += slope  # 0 outside, where the result's gradient is.
        row, inside, place, value, slope = later, later_inside, later_place, later_value, later_slope
    if partial is not None:
        tl.store(partial + group * WIDTH + column, tl.sum(total, 0), column < WIDTH)


@triton.jit
def sum_rows(partial, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums a float32 matrix [rows, columns] over its rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + row[:, None] * columns + column[None, :], inside, 0.0)
    tl.store(sums + column, tl.sum(total, 0), column < columns)
