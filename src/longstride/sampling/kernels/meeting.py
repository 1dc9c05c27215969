"""Synchronization of the programs of one kernel: who waits for a counter sees what the others wrote before they arrived.

All programs must be resident on the GPU at once. Triton's interpreter runs programs one after the other; there, a kernel has
one program, which has always arrived when it waits. Tests run several by turns (`tests/sampling/programs.py`).
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """Publishes what this program has written to those that wait for the counter, and adds 1 to it."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    """Waits until there were `target` arrivals."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass


@triton.jit
def fresh(address, mask):
    """Loads what another program has written: from the L2 cache, as this program's L1 may have older content."""
    return tl.load(address, mask, 0.0, cache_modifier=".cg")
