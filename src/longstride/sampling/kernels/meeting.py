"""Programs of one kernel that meet: what one has written before it arrives, those find that have waited for it.

There must be room for all of them on the GPU at once. In Triton's interpreter, where they run one after the other, there is
one, and it has always arrived when it waits.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """What this program has written is there for those that wait for it."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    """Until so many have arrived."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass


@triton.jit
def fresh(place, mask):
    """What another program has written, past this one's own cache."""
    return tl.load(place, mask, 0.0, cache_modifier=".cg")
