"""Matrix products of the feed-forward network with gelu in their epilogue, for Hopper GPUs.

    gelu_product             gelu(z) and gelu'(z) of z = x weight^T + bias
    gelu_product_gradient    d_z = (d_output weight) * gelu'(z), and its sum over all rows

A program keeps one panel of the weights, 128 columns of the result, in shared memory. A producer warp copies tiles of the
left operand into a ring. Two warpgroups take tiles of 128 rows in turn: while one has the tensor cores, the other computes
gelu, or multiplies by its slope, and writes its results. These leave through shared memory, in units of 64 rows, by TMA;
slopes arrive in the same units. TMA reads zeros past the last row, and writes nothing there.

The programs of all panels go through the same rows at about the same time, so that these come from the L2 cache.
"""

# mypy: ignore-errors
# Triton compiles a part of this file: its arguments have Triton's types, not Python's.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longstride.attention.kernels.arguments import compiled
from longstride.attention.kernels.hopper.ring import make_barriers, make_ring, make_tiles
from longstride.attention.kernels.hopper.tiles import mma_layout
from longstride.attention.kernels.launch import Descriptor, Launch
from longstride.attention.kernels.settings import processors
from longstride.model.residual_kernels import ALIGNMENT, launch_sum_rows, run_plan

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Rows and columns of a tile of the result; columns of a tile of the left operand."""

SHALLOW = 256
"""Up to this depth the weights leave room for a longer ring."""


class ProgramTiles(NamedTuple):
    """The tiles of a program: those of `first`, `first + apart` and so on, at `column`."""

    first: Any
    end: Any
    apart: Any
    column: Any
    width: Any  # of the result


class Tiles(NamedTuple):
    """Compiled in, as one constexpr."""

    steps: Any  # tiles of the left operand in a row
    stages: Any  # tiles of the ring
    units: Any  # of a warpgroup, on their way in or out
    unit: Any  # columns of a unit


def product_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, slope: Tensor | None) -> None:
    """Fills output and slope [..., width] from x [..., depth] and weight [width, depth]."""
    width, depth = weight.shape

    def launches(tensors, workspace):
        x, weight, bias, output, slope = tensors
        setting = _setting(depth, False)
        results = (None if y is None else _describe(y, ROWS // 2, setting.unit) for y in (output, slope))
        descriptors = _describe(x, ROWS, DEPTH), _describe(weight, COLUMNS, DEPTH), bias, *results
        return [_launch(gelu_product, descriptors, setting, len(x), width, x.device)]

    _run("product_gelu", depth, [x, weight, bias, output, slope], launches)


def product_gelu_backward(d_output: Tensor, weight: Tensor, slope: Tensor, gradient: Tensor, sums: Tensor | None) -> None:
    """Fills the gradient [..., width] and its sums over the rows from d_output [..., depth] and weight [depth, width]."""
    depth, width = weight.shape

    def launches(tensors, workspace):
        d_output, weight, slope, gradient, sums = tensors
        groups = _groups(len(d_output), width, d_output.device)
        partial = None if sums is None else workspace.new(2 * groups, width)
        setting = _setting(depth, True)
        units = (_describe(y, ROWS // 2, setting.unit) for y in (slope, gradient))
        descriptors = _describe(d_output, ROWS, DEPTH), _describe(weight, DEPTH, COLUMNS), *units, partial
        launch = _launch(gelu_product_gradient, descriptors, setting, len(d_output), width, d_output.device)
        return [launch] if sums is None else [launch, launch_sum_rows(partial, sums, 2 * groups)]

    _run("product_gelu_backward", depth, [d_output, weight, slope, gradient, sums], launches)


def _run(name: str, depth: int, tensors: list[Tensor | None], launches: Callable) -> None:
    """All but biases and sums are matrices, which TMA reads and writes at addresses that are multiples of 16 bytes."""
    matrices = [x if x is None or x.dim() == 1 else _aligned(x).flatten(0, -2) for x in tensors]
    run_plan((name, len(matrices[0]), depth, matrices[3].shape[1]), matrices, launches)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() & ALIGNMENT else x


def _describe(x: Tensor, rows: int, columns: int) -> Descriptor:
    return Descriptor(x, 0, tuple(x.shape), x.stride(), (rows, columns))


def _groups(rows: int, width: int, device: torch.device) -> int:
    """Programs of a panel."""
    return max(1, min(processors(device) * COLUMNS // width, -(-rows // ROWS)))


def _launch(
    kernel: Any, arguments: tuple[Any, ...], setting: Tiles, rows: int, width: int, device: torch.device
) -> Launch:  # fmt: skip
    panels = width // COLUMNS
    constants = {"TILES": compiled(Tiles, **setting._asdict()), "num_warps": 4}
    return Launch(kernel, panels * _groups(rows, width, device), (*arguments, rows, panels), constants)


def _setting(depth: int, gradient: bool) -> Tiles:
    """The fastest of those that were measured on an H200 and fit into shared memory (docs/log.md)."""
    if depth <= SHALLOW:
        return Tiles(depth // DEPTH, 8, 2, 64)
    return Tiles(depth // DEPTH, *((4, 2, 64) if gradient else (5, 2, 32)))


@gluon.jit
def copy_tiles(left, weight, ring, panel, panel_full, place, TILES: gl.constexpr):
    """The producer warp."""
    BY_ROWS: gl.constexpr = weight.block_type.shape[0] == 128
    mbarrier.expect(panel_full, TILES.steps * 128 * 64 * 2)
    for step in gl.static_range(TILES.steps):
        if BY_ROWS:
            tma.async_copy_global_to_shared(weight, [place.column, step * 64], panel_full, panel.index(step))
        else:
            tma.async_copy_global_to_shared(weight, [step * 64, place.column], panel_full, panel.index(step))
    turn = 0
    for tile in range(place.first, place.end, place.apart):
        for _ in range(TILES.steps):
            ring.fill(turn, left, [tile * 128, turn % TILES.steps * 64])
            turn += 1


@gluon.jit
def add_products(tile, right, upper, lower, ADD: gl.constexpr, BY_ROWS: gl.constexpr):
    """Starts the products of a tile of the left operand. BY_ROWS: the columns of the right one lie in rows."""
    if BY_ROWS:
        right = right.permute((1, 0))
    upper = warpgroup_mma(tile.slice(0, 64), right, upper, use_acc=ADD, is_async=True)
    lower = warpgroup_mma(tile.slice(64, 64), right, lower, use_acc=ADD, is_async=True)
    return upper, lower


@gluon.jit
def multiply(ring, panel, order, number, GROUP: gl.constexpr, TILES: gl.constexpr, BY_ROWS: gl.constexpr):
    """The products of a warpgroup's tile with this number: rows 0 to 63, and 64 to 127."""
    layout: gl.constexpr = mma_layout(128)
    upper = gl.zeros([64, 128], gl.float32, layout)
    lower = gl.zeros([64, 128], gl.float32, layout)
    first = (2 * number + GROUP) * TILES.steps
    # The other warpgroup has started the products of the tile before, so all earlier turns of the ring are full.
    mbarrier.wait(order.index(GROUP), (number + 1 + GROUP) & 1)
    upper, lower = add_products(ring.wait_full(first), panel.index(0), upper, lower, False, BY_ROWS)
    upper, lower = warpgroup_mma_wait(2, deps=(upper, lower))
    for step in range(1, TILES.steps):
        tile = ring.wait_full(first + step)
        upper, lower = add_products(tile, panel.index(step), upper, lower, True, BY_ROWS)
        upper, lower = warpgroup_mma_wait(2, deps=(upper, lower))
        ring.release(first + step - 1)
    mbarrier.arrive(order.index(1 - GROUP), count=1)
    upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
    ring.release(first + TILES.steps - 1)
    return upper, lower


@gluon.jit
def parts_of(x, UNIT: gl.constexpr):
    """[64, 128] as units of so many columns, 64 or 32."""
    parts = halves(x)
    if UNIT == 32:
        parts = halves(parts[0]) + halves(parts[1])
    return parts


@gluon.jit
def halves(x):
    """The left and the right columns."""
    columns: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, (64, 2, columns)), (0, 2, 1)))
    return gl.convert_layout(left, mma_layout(columns)), gl.convert_layout(right, mma_layout(columns))


@gluon.jit
def unit_place(tile, place, NUMBER: gl.constexpr, TILES: gl.constexpr):
    """Row and column of the unit of a tile with this number."""
    across: gl.constexpr = 128 // TILES.unit
    return [tile * 128 + NUMBER // across * 64, place.column + NUMBER % across * TILES.unit]


@gluon.jit
def copy_out(descriptor, tile, place, value, units, NUMBER: gl.constexpr, COUNT: gl.constexpr, TILES: gl.constexpr):
    """Starts to write a unit. COUNT: how many came before it."""
    unit = units.index(COUNT % TILES.units)
    tma.store_wait(TILES.units - 1)
    unit.store(value.to(descriptor.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, unit_place(tile, place, NUMBER, TILES), unit)


@gluon.jit
def write_gelu(z, bias, output, slope, units, tile, place, NUMBER: gl.constexpr, TILES: gl.constexpr):
    """Adds the bias to a unit, and writes its gelu and the slope of that."""
    if bias is not None:
        column = unit_place(tile, place, NUMBER, TILES)[1] + gl.arange(0, TILES.unit, gl.SliceLayout(0, z.type.layout))
        z += gl.load(bias + column).to(gl.float32)[None, :]
    gate = reciprocal(1.0 + gl.exp2(z * (-1.702 * 1.4426950408889634)))
    gelu = z * gate
    if slope is None:
        copy_out(output, tile, place, gelu, units, NUMBER, NUMBER, TILES)
    else:
        copy_out(output, tile, place, gelu, units, NUMBER, 2 * NUMBER, TILES)
        steepness = gelu * 1.702
        copy_out(slope, tile, place, gate + steepness - steepness * gate, units, NUMBER, 2 * NUMBER + 1, TILES)


@gluon.jit
def reciprocal(x):
    """1 / x, with an error of one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def compute_gelu(
    GROUP: gl.constexpr, ring, panel, panel_full, order, units, bias, output, slope, place, TILES: gl.constexpr
):  # fmt: skip
    """A warpgroup of `gelu_product`."""
    mbarrier.wait(panel_full, 0)
    number = 0
    for tile in range(place.first + GROUP * place.apart, place.end, 2 * place.apart):
        sums = multiply(ring, panel, order, number, GROUP, TILES, True)
        number += 1
        for half in gl.static_range(2):
            parts = parts_of(sums[half], TILES.unit)
            for part in gl.static_range(len(parts)):
                write_gelu(parts[part], bias, output, slope, units, tile, place, half * len(parts) + part, TILES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "panels"])
def gelu_product(x, weight, bias, output, slope, rows, panels, TILES: gl.constexpr):
    """x, weight, output, slope: tensor descriptors."""
    place = locate(rows, panels)
    dtype: gl.constexpr = x.dtype
    ring, panel, panel_full, order = allocate(dtype, TILES, 128, 64)
    units_0 = make_tiles(dtype, TILES.units, 64, TILES.unit)
    units_1 = make_tiles(dtype, TILES.units, 64, TILES.unit)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                compute_gelu,
                (gl.constexpr(0), ring, panel, panel_full, order, units_0, bias, output, slope, place, TILES),
            ),
            (
                compute_gelu,
                (gl.constexpr(1), ring, panel, panel_full, order, units_1, bias, output, slope, place, TILES),
            ),
            (copy_tiles, (x, weight, ring, panel, panel_full, place, TILES)),
        ],
        [4, 1],  # warps of the second warpgroup and of the producer
        [240, 24],  # and their registers
    )


@gluon.jit
def locate(rows, panels):
    program = gl.program_id(0)
    return ProgramTiles(
        program // panels, (rows + 127) // 128, gl.num_programs(0) // panels, program % panels * 128, panels * 128
    )


@gluon.jit
def allocate(dtype: gl.constexpr, TILES: gl.constexpr, PANEL_ROWS: gl.constexpr, PANEL_COLUMNS: gl.constexpr):
    ring = make_ring(dtype, TILES.stages, 128, 64, 1)
    panel = make_tiles(dtype, TILES.steps, PANEL_ROWS, PANEL_COLUMNS)
    return ring, panel, make_barriers(1).index(0), make_barriers(2)


@gluon.jit
def fetch(slope, units, full, tile, place, NUMBER: gl.constexpr, TILES: gl.constexpr):
    """Starts to read the slopes of a unit, if there is such a tile."""
    barrier = full.index(NUMBER % TILES.units)
    present = tile < place.end
    mbarrier.expect(barrier, 64 * TILES.unit * 2, pred=present)
    where = unit_place(tile, place, NUMBER, TILES)
    tma.async_copy_global_to_shared(slope, where, barrier, units.index(NUMBER % TILES.units), pred=present)


@gluon.jit
def write_gradient(
    d, slope, gradient, units, full, tile, number, place, NUMBER: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Multiplies a unit by its slopes, which are in shared memory, and writes it from there. After the last of the units in
    shared memory it fetches the slopes of the next ones. Returns the sums of rows that are 8 apart."""
    UNITS: gl.constexpr = TILES.units
    of_tile: gl.constexpr = 256 // TILES.unit
    unit = units.index(NUMBER % UNITS)
    mbarrier.wait(full.index(NUMBER % UNITS), (number * (of_tile // UNITS) + NUMBER // UNITS) & 1)
    d = d * unit.load(d.type.layout).to(gl.float32)
    unit.store(d.to(gradient.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(gradient, unit_place(tile, place, NUMBER, TILES), unit)
    if NUMBER % UNITS == UNITS - 1:
        later = tile
        if of_tile == NUMBER + 1:
            later = tile + 2 * place.apart
        for other in gl.static_range(UNITS):
            tma.store_wait(UNITS - 1 - other)
            fetch(slope, units, full, later, place, (NUMBER + 1 + other) % of_tile, TILES)
    return fold(d)


@gluon.jit
def fold(x):
    """Adds those rows of a unit that a thread has, which are 8 apart."""
    return gl.sum(gl.reshape(x, (4, 2, 8, x.shape[1])), 1)


@gluon.jit
def add_each(totals, others):
    sums = ()
    for number in gl.static_range(len(totals)):
        sums = sums + (totals[number] + others[number],)
    return sums


@gluon.jit
def compute_gradient(
    GROUP: gl.constexpr, ring, panel, panel_full, order, units, full, slope, gradient, partial, place, TILES: gl.constexpr
):  # fmt: skip
    """A warpgroup of `gelu_product_gradient`."""
    nothing = fold(gl.zeros([64, TILES.unit], gl.float32, mma_layout(TILES.unit)))
    totals = (nothing,) * (128 // TILES.unit)
    start = place.first + GROUP * place.apart
    for unit in gl.static_range(TILES.units):
        fetch(slope, units, full, start, place, unit, TILES)
    mbarrier.wait(panel_full, 0)
    number = 0
    for tile in range(start, place.end, 2 * place.apart):
        sums = multiply(ring, panel, order, number, GROUP, TILES, False)
        for half in gl.static_range(2):
            parts = parts_of(sums[half], TILES.unit)
            added = ()
            for part in gl.static_range(len(parts)):
                total = write_gradient(
                    parts[part], slope, gradient, units, full, tile, number, place, half * len(parts) + part, TILES
                )  # fmt: skip
                added = added + (total,)
            totals = add_each(totals, added)
        number += 1
    if partial is not None:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        row = partial + (place.first * 2 + GROUP) * place.width + place.column + gl.arange(0, TILES.unit, layout)
        for part in gl.static_range(len(totals)):
            gl.store(row + part * TILES.unit, gl.convert_layout(gl.sum(gl.sum(totals[part], 1), 0), layout))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "panels"])
def gelu_product_gradient(d_output, weight, slope, gradient, partial, rows, panels, TILES: gl.constexpr):
    """d_output, weight, slope, gradient: tensor descriptors. partial: [2 * programs / panels, width], of each warpgroup."""
    place = locate(rows, panels)
    dtype: gl.constexpr = d_output.dtype
    ring, panel, panel_full, order = allocate(dtype, TILES, 64, 128)
    units_0 = make_tiles(dtype, TILES.units, 64, TILES.unit)
    units_1 = make_tiles(dtype, TILES.units, 64, TILES.unit)
    full_0 = make_barriers(TILES.units)
    full_1 = make_barriers(TILES.units)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                compute_gradient,
                (gl.constexpr(0), ring, panel, panel_full, order, units_0, full_0, slope, gradient, partial, place, TILES),
            ),
            (
                compute_gradient,
                (gl.constexpr(1), ring, panel, panel_full, order, units_1, full_1, slope, gradient, partial, place, TILES),
            ),
            (copy_tiles, (d_output, weight, ring, panel, panel_full, place, TILES)),
        ],
        [4, 1],
        [240, 24],
    )
