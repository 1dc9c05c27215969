"""fill_mask: the Triton kernel that draws a dropout mask from a seed."""

# mypy: ignore-errors
# Triton compiles a part of this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl
from torch import Tensor

COUNTERS = 512
"""Counters of a program. The generator makes four numbers of each."""


def fill_mask(mask: Tensor, seed: Tensor, keep: float) -> None:
    """Fills a contiguous mask: True with probability `keep`."""
    size = mask.numel()
    _fill_mask[(triton.cdiv(size, 4 * COUNTERS),)](mask, seed, size, keep, COUNTERS)


@triton.jit
def _fill_mask(mask, seed, size, keep, counters: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, counters)
    a, b, c, d = tl.rand4x(tl.load(seed), program * counters + lane)
    first = program.to(tl.int64) * 4 * counters + lane
    tl.store(mask + first, a < keep, first < size)
    tl.store(mask + first + counters, b < keep, first + counters < size)
    tl.store(mask + first + 2 * counters, c < keep, first + 2 * counters < size)
    tl.store(mask + first + 3 * counters, d < keep, first + 3 * counters < size)
