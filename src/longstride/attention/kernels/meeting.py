"""Programs of one kernel that meet: what one has written before it arrives, those find that have waited for it."""

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """What this program has written is there for those that wait for it."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass


@triton.jit
def fresh(pointer, mask, other=0.0):
    """What another program has written, past this one's own cache."""
    return tl.load(pointer, mask, other, cache_modifier=".cg")


@triton.jit
def wide(number):
    """64 bits, as an address needs."""
    return tl.full([], 0, tl.int64) + number
