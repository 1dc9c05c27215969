"""Asserts that interpreted kernels load and store inside of their tensors, which Triton's interpreter does not.

On a GPU an address outside reads or overwrites somebody else's memory, often without a sign of it.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter

Memory = tuple[list[int], list[int]]
_now = threading.local()
"""Of the launch that runs in a thread, `memory`: starts and ends of that of its tensors, ascending."""
_native = interpreter._interpreter
_prepare = interpreter.GridExecutor._init_args_hst


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


def _memory(x: Tensor) -> tuple[int, int]:
    """The addresses of what a view shows, not of all that lies in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def prepare(self: Any, given: Any, named: Any) -> Any:
    hosts = _prepare(self, given, named)
    starts, ends = [], []
    for start, end in sorted(map(_memory, _tensors([*hosts[0], *hosts[1].values()]))):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    allow((starts, ends))
    return hosts


def allowed() -> Memory:
    return _now.memory


def allow(memory: Memory) -> None:
    """Allows this thread the memory of a launch."""
    _now.memory = memory


def check(addresses: Any, mask: Any, size: int) -> None:
    used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
    if not used.size:
        return
    starts, ends = allowed()
    first, last = int(used.min()), int(used.max())
    part = bisect_right(starts, first) - 1
    if part >= 0 and last + size <= ends[part]:
        return  # As nearly always: all of one tensor.
    parts = np.searchsorted(np.array(starts, np.uint64), used, "right") - 1
    inside = (parts >= 0) & (used + np.uint64(size) <= np.array(ends, np.uint64)[parts])
    assert inside.all(), f"{(~inside).sum()} of {used.size} addresses are outside of the kernel's tensors"


class Checked:
    """Triton's own part of the interpreter, with addresses that are checked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_native, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(addresses, mask, np.dtype(dtype).itemsize)
        return _native.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        check(addresses, mask, value.dtype.itemsize)
        return _native.store(addresses, value, mask)


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interpreter, "_interpreter", Checked())
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", prepare)
