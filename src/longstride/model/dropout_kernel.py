"""fill_mask: the Triton kernel that draws a dropout mask from a seed.

The numbers of a mask are those of a generator that has a counter and no state: element e is number e % 4 of counter e // 4.
Any kernel can so draw the part of a mask that it needs (`draw_numbers`).
"""

# mypy: ignore-errors
# Triton compiles a part of this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl
from torch import Tensor

EACH = 4
"""Numbers that the generator makes of a counter."""
COUNTERS = 512
"""Counters of a program."""


def fill_mask(mask: Tensor, seed: Tensor, keep: float) -> None:
    """Fills a contiguous mask: True with probability `keep`."""
    size = mask.numel()
    _fill_mask[(triton.cdiv(size, EACH * COUNTERS),)](mask, seed, size, keep, COUNTERS)


@triton.jit
def draw_numbers(seed, counters):
    """Returns the uniform numbers of counters [..., c], as [..., 4 c]. `seed`: a pointer."""
    a, b, c, d = tl.rand4x(tl.load(seed), counters)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _fill_mask(mask, seed, size, keep, COUNTERS: tl.constexpr):
    program = tl.program_id(0)
    numbers = draw_numbers(seed, program * COUNTERS + tl.arange(0, COUNTERS))
    element = program.to(tl.int64) * 4 * COUNTERS + tl.arange(0, 4 * COUNTERS)
    tl.store(mask + element, numbers < keep, element < size)
