"""Compilation of several kernels at once, in threads, before they are launched.

Triton compiles a kernel at its first launch, and the call waits for one kernel after the other. Most of that time passes in
compilers, which do not hold Python's lock. So as many kernels as there are cores take little longer than one.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch

MOST_THREADS = 32
"""More would wait for Python's lock, and each takes memory."""
Compile = Callable[[], Any]
"""Has Triton compile a kernel, without a launch, by its method `warmup`."""


class Compiler:
    """Compiles kernels in threads of its own, from the moment that they are added."""

    def __init__(self) -> None:
        import triton

        self.threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        self.mode: Any = triton.AsyncCompileMode(self.threads)
        self.kernels: list[tuple[Any, int]] = []
        """Kernels that are being compiled, and the indices of their devices."""
        self.plans: set[Hashable] = set()

    def add(self, kernels: Iterable[Compile], device: int) -> None:
        """Starts to compile kernels. Those that Triton has in memory cost next to nothing."""

        def start() -> None:
            self.mode.__enter__()  # In a context of its own, so that it is left without a wait.
            with torch.cuda.device(device):
                self.kernels += [(kernel(), device) for kernel in kernels]

        Context().run(start)

    def finish(self) -> None:
        """Waits for all kernels, and loads them."""

        def wait() -> None:
            with self.mode:
                pass

        try:
            Context().run(wait)
            for _ in self.threads.map(_load, self.kernels):
                pass
        finally:
            self.stop()

    def stop(self) -> None:
        """Adds nothing more. What has been added is compiled still, after an error too: Triton 3.7 keeps a kernel that is
        being compiled for later launches, and those of a cancelled one would fail."""
        self.threads.shutdown(wait=False)


def _load(item: tuple[Any, int]) -> None:
    """Loads a compiled kernel. Triton 3.6 has a C compiler make its launcher, which takes as long as a small kernel."""
    import triton

    kernel, device = item
    if isinstance(kernel, triton.FutureKernel):
        kernel = kernel.result()
    if kernel is not None:  # A hook of Triton's may leave a compilation out.
        with torch.cuda.device(device):
            _ = kernel.run


def compile_together(kernels: Iterable[Compile], device: int) -> None:
    """Compiles and loads kernels for the device of this index."""
    compiler = Compiler()
    compiler.add(kernels, device)
    compiler.finish()


_COMPILER = "longstride_compiler"
"""Name of the compiler in PyTorch's storage of a thread, which autograd's threads share during a backward pass of it."""


def _compiler() -> Compiler | None:
    return torch._C._get_obj_in_tls(_COMPILER) if torch._C._is_key_in_tls(_COMPILER) else None


def _stash(value: Compiler | None) -> None:
    """Makes it the compiler of this thread.

    PyTorch 2.11 drops a reference to what it had, without having taken one; 2.13 takes one."""
    count = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(_COMPILER, value)
    if sys.getrefcount(value) == count:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def compile_only() -> Iterator[None]:
    """Context in which plans that have not run yet do not run: their results stay as they are in memory. At its end their
    kernels are compiled and loaded. It holds for this thread and for autograd's in its backward passes."""
    assert _compiler() is None
    compiler = Compiler()
    _stash(compiler)
    try:
        yield
    except BaseException:
        compiler.stop()
        raise
    finally:
        _stash(None)
    compiler.finish()


def only_compiles(plan: Hashable, kernels: Iterable[Compile], device: int) -> bool:
    """Returns whether kernels are only compiled now, and if so starts to compile those of the plan."""
    compiler = _compiler()
    if compiler is None:
        return False
    if plan not in compiler.plans:
        compiler.plans.add(plan)
        compiler.add(kernels, device)
    return True
