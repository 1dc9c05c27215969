"""Merged fixed attention, forward, in Gluon for Hopper: what warp specialization would give beside the Triton kernels.

python benchmarks/experiments/fixed_forward.py

A producer warp copies keys and values into shared memory with the tensor copy engine, which gathers the summary cells of
several blocks as one box; two consumer warpgroups of 64 queries each keep the product of the next tile in flight while
they take the softmax of this one. Programs are persistent, so that loads go on while results are written. Only l = 128,
a c that divides 128, contiguous inputs and Triton 3.6's Gluon; docs/log.md has the result.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longstride import attend, fixed
from longstride.benchmarks.measure import seconds_each
from longstride.patterns import union

BLOCK = 128
LOG2_E = 1.4426950408889634


@gluon.jit
def copy_tiles(
    queries, key_cells, value_cells, own_keys, own_values, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, heads, blocks, cells, first_cell, items,
    BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CELLS: gl.constexpr, cell_layout: gl.constexpr,
):  # fmt: skip
    """The producer. Tiles of summary cells first, the own block last; the items with most work first."""
    count = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head = item % heads
        block = blocks - 1 - item // heads
        total = (block * cells + BLOCK - 1) // BLOCK + 1
        own = (head * blocks + block) * BLOCK
        mbarrier.wait(q_empty, (done & 1) ^ 1)
        mbarrier.expect(q_full, BLOCK * D * 2)
        tma.async_copy_global_to_shared(queries, [own, 0], q_full, q_tile)
        for tile in range(total):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            first_block = head * blocks + tile * (BLOCK // CELLS)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK * D * 2)
            k_tile = k_tiles.index(stage)
            if tile + 1 < total:
                k_box = k_tile._reinterpret(k_tiles.dtype, [BLOCK // CELLS, CELLS, D], cell_layout)
                tma.async_copy_global_to_shared(key_cells, [first_block, first_cell, 0], k_full.index(stage), k_box)
            else:
                tma.async_copy_global_to_shared(own_keys, [own, 0], k_full.index(stage), k_tile)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK * D * 2)
            v_tile = v_tiles.index(stage)
            if tile + 1 < total:
                v_box = v_tile._reinterpret(v_tiles.dtype, [BLOCK // CELLS, CELLS, D], cell_layout)
                tma.async_copy_global_to_shared(value_cells, [first_block, first_cell, 0], v_full.index(stage), v_box)
            else:
                tma.async_copy_global_to_shared(own_values, [own, 0], v_full.index(stage), v_tile)
            count += 1
        done += 1


@gluon.jit
def take_softmax(scores, running_max, weight, scale):
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_max[:, None])
    shrink = gl.exp2(running_max - new_max)
    return weights, shrink, new_max, weight * shrink + gl.sum(weights, 1)


@gluon.jit
def hide(scores, tile, total, before, first_row, BLOCK: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Cells that are not there, or in the own block the future."""
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    last = gl.where(tile + 1 == total, row, row * 0 + (before - tile * BLOCK - 1))
    return gl.where(column[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def compute_tiles(
    half, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, output, log_sum_exp,
    heads, blocks, cells, items, scale, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer, for one half of the rows."""
    ROWS: gl.constexpr = BLOCK // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    query = q_tile.slice(half * ROWS, ROWS)
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, score_layout)
    count = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head = item % heads
        block = blocks - 1 - item // heads
        before = block * cells
        total = (before + BLOCK - 1) // BLOCK + 1
        running_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        weight = gl.zeros([ROWS], gl.float32, row_layout)
        sums = gl.zeros([ROWS, D], gl.float32, sum_layout)
        mbarrier.wait(q_full, done & 1)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        scores = warpgroup_mma(query, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        for tile in range(total - 1):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            count += 1
            ahead = count % STAGES
            mbarrier.wait(k_full.index(ahead), (count // STAGES) & 1)
            following = warpgroup_mma(query, k_tiles.index(ahead).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if (tile + 1) * BLOCK > before:
                scores = hide(scores, tile, total, before, half * ROWS, BLOCK, ROWS, score_layout)
            weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
            sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout))[:, None]
            operand = gl.convert_layout(weights.to(v_tiles.dtype), weight_layout)
            mbarrier.wait(v_full.index(stage), phase)
            sums = warpgroup_mma(operand, v_tiles.index(stage), sums, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(following,))
            mbarrier.arrive(k_empty.index(ahead), count=1)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index(stage), count=1)
        stage = count % STAGES
        phase = (count // STAGES) & 1
        count += 1
        done += 1
        mbarrier.arrive(q_empty, count=1)
        scores = hide(scores, total - 1, total, before, half * ROWS, BLOCK, ROWS, score_layout)
        weights, shrink, running_max, weight = take_softmax(scores, running_max, weight, scale)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout))[:, None]
        operand = gl.convert_layout(weights.to(v_tiles.dtype), weight_layout)
        mbarrier.wait(v_full.index(stage), phase)
        sums = warpgroup_mma(operand, v_tiles.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_empty.index(stage), count=1)

        sums = sums / gl.convert_layout(weight, gl.SliceLayout(1, sum_layout))[:, None]
        first = ((head * blocks + block) * BLOCK + half * ROWS).to(gl.int64)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, D, gl.SliceLayout(0, store_layout))
        place = output + (first + row)[:, None] * D + column[None, :]
        gl.store(place, gl.convert_layout(sums.to(v_tiles.dtype), store_layout))
        gl.store(log_sum_exp + first + gl.arange(0, ROWS, row_layout), running_max + gl.log2(weight))


@gluon.jit
def fixed_forward(
    queries, key_cells, value_cells, own_keys, own_values, output, log_sum_exp, heads, blocks, cells, first_cell, items,
    scale, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CELLS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = queries.dtype
    layout: gl.constexpr = queries.layout
    cell_layout: gl.constexpr = key_cells.layout
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK, D], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_tiles, (
                0, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, output, log_sum_exp,
                heads, blocks, cells, items, scale, BLOCK, D, STAGES,
            )),
            (compute_tiles, (
                1, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, output, log_sum_exp,
                heads, blocks, cells, items, scale, BLOCK, D, STAGES,
            )),
            (copy_tiles, (
                queries, key_cells, value_cells, own_keys, own_values, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, heads, blocks, cells, first_cell, items, BLOCK, D, STAGES, CELLS, cell_layout,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers
    )  # fmt: skip


def prepare(q, k, v, c, stages=3):
    """A call that computes merged fixed attention, and where it puts the output."""
    batch, heads, n, d = q.shape
    rows, boxes = [BLOCK, d], [BLOCK // c, c, d]
    layout = gl.NVMMASharedLayout.get_default_for(rows, gl.bfloat16)
    cell_layout = gl.NVMMASharedLayout.get_default_for(boxes, gl.bfloat16)
    queries, own_keys, own_values = (TensorDescriptor.from_tensor(x.view(-1, d), rows, layout) for x in (q, k, v))
    key_cells, value_cells = (TensorDescriptor.from_tensor(x.view(-1, BLOCK, d), boxes, cell_layout) for x in (k, v))
    output, log_sum_exp = torch.empty_like(v), torch.empty(batch, heads, n, device=q.device)
    items = batch * heads * n // BLOCK
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count

    def call():
        fixed_forward[(programs,)](
            queries, key_cells, value_cells, own_keys, own_values, output, log_sum_exp, batch * heads, n // BLOCK, c,
            BLOCK - c, items, d**-0.5 * LOG2_E, BLOCK, d, stages, c, num_warps=4,
        )  # fmt: skip

    return call, output


def main():
    q, k, v = (torch.randn(8, 8, 12_288, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def dense():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    calls = {"cuDNN dense": dense}
    for c in (32, 8):
        pattern = union(*fixed(BLOCK, c))
        calls[f"Triton, c = {c}"] = lambda pattern=pattern: attend(q, k, v, pattern)
        calls[f"Gluon, c = {c}"], output = prepare(q, k, v, c)
        calls[f"Gluon, c = {c}"]()
        torch.testing.assert_close(output, attend(q, k, v, pattern), atol=1e-2, rtol=1e-2)
    times = seconds_each(calls, 9, torch.device("cuda"))
    for name, time in times.items():
        print(f"{name:16} {time * 1e3:.3f} ms  {times['cuDNN dense'] / time:.2f}x")


if __name__ == "__main__":
    main()
