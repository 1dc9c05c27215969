"""Kernels that are compiled together, with kernels that stand in for Triton's."""

import ctypes
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import triton

from longstride.attention.kernels import launch
from longstride.attention.kernels.compilation import Compiler, compile_only, compile_together
from longstride.attention.kernels.launch import Launch, Plan, Workspace


class Kernel:
    """Says what Triton is asked to do with it. Its compilation waits for that of its companions."""

    def __init__(self, done, together=None, error=None):
        self.done, self.together, self.error, self.cached = done, together, error, None

    def warmup(self, *arguments, grid, **constants):
        if self.cached is not None:
            return self.cached
        mode = triton.runtime._async_compile.active_mode.get()
        return mode.submit(id(self), self._compile, lambda kernel: setattr(self, "cached", kernel))

    def _compile(self):
        if self.together is not None:
            self.together.wait(10)
        if self.error is not None:
            raise self.error
        self.done.append("compiled")
        return self

    @property
    def run(self):
        self.done.append("loaded")

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.done.append(("launched", grid, arguments, constants))


def plan(kernels, x):
    return Plan([Launch(kernel, 3, (x, 5), {"num_warps": 4}) for kernel in kernels], [x], Workspace(x.device), True)


def test_kernels_are_compiled_at_the_same_time_and_loaded(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    done, together = [], threading.Barrier(3)  # Broken unless three threads reach it.
    kernels = [Kernel(done, together) for _ in range(3)]
    compile_together([partial(kernel.warmup, grid=(1,)) for kernel in kernels], -1)
    assert done == ["compiled"] * 3 + ["loaded"] * 3
    # Triton has them in memory now.
    compile_together([partial(kernel.warmup, grid=(1,)) for kernel in kernels], -1)
    assert done[6:] == ["loaded"] * 3


def test_a_compilation_that_a_hook_leaves_out_loads_nothing():
    compile_together([lambda: None], -1)


class InBackward(torch.autograd.Function):
    """Calls a function in its backward pass. Of backward passes in each other, autograd computes deep ones in a thread."""

    @staticmethod
    def forward(ctx, x, function, depth):
        ctx.function, ctx.depth = function, depth
        return x.clone()

    @staticmethod
    def backward(ctx, d_output):
        if ctx.depth:
            with torch.enable_grad():
                InBackward.apply(torch.ones(1, requires_grad=True), ctx.function, ctx.depth - 1).backward()
        else:
            ctx.function()
        return d_output, None, None


def test_plans_do_not_run_while_kernels_are_only_compiled():
    done, x, y, threads = [], torch.ones(4), torch.zeros(4), set()
    kernels = [Kernel(done), Kernel(done)]
    first, second = plan(kernels[:1], x), plan(kernels, x)

    def run_second():
        threads.add(threading.get_ident())
        second.run([x])

    with compile_only():
        first.run([x])
        InBackward.apply(torch.ones(1, requires_grad=True), run_second, 100).backward()
        assert threads != {threading.get_ident()}
        second.run([y])
        assert set(done) <= {"compiled"}
    # Each launch is compiled once, though the second plan ran twice; the first kernel, of both plans, too.
    assert sorted(done) == ["compiled"] * 2 + ["loaded"] * 3
    done.clear()
    second.run([y])
    assert [(what, grid, arguments[0] is y, arguments[1], constants) for what, grid, arguments, constants in done] == [
        ("launched", (3,), True, 5, {"num_warps": 4})
    ] * 2


def test_the_compiler_outlives_its_storage_in_pytorch_and_nothing_else(monkeypatch):
    """PyTorch 2.11 drops a reference that it has not taken."""
    kept, made, references = [], [], []

    def stash(name, value):
        if kept:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(kept.pop()))
        kept.append(id(value))

    def start(self):
        made.append(weakref.ref(self))
        init(self)

    init = Compiler.__init__
    monkeypatch.setattr(Compiler, "__init__", start)
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stash)
    monkeypatch.setattr(Compiler, "finish", lambda self: references.append(sys.getrefcount(self)))
    for _ in range(2):
        with compile_only():
            pass
    assert references == [references[0]] * 2
    assert references[0] >= 2  # That of the context and its own argument's.
    assert [there() for there in made] == [None, None]


def test_plans_of_other_threads_run_while_kernels_are_only_compiled():
    done, x = [], torch.ones(4)
    made, own, other = plan([Kernel([])], x), plan([Kernel([])], x), plan([Kernel(done)], x)

    def in_another_thread():
        other.run([x])
        with compile_only():
            own.run([x])

    with compile_only():
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        made.run([x])
    assert [what[0] for what in done] == ["launched"]
    assert own.launches[0].kernel.done == made.launches[0].kernel.done == ["compiled", "loaded"]


@pytest.mark.parametrize(("count", "capturing", "together"), [(2, False, True), (1, False, False), (2, True, False)])
def test_the_kernels_of_a_plan_are_compiled_together(count, capturing, together, monkeypatch):
    """As on a GPU. A single kernel is compiled by its launch, as are all in a capture, which threads must not disturb."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(launch, "relaxed_capture", nullcontext)
    done, x = [], torch.ones(4)
    made = Plan([Launch(Kernel(done), 3, (x,), {}) for _ in range(count)], [x], Workspace(x.device), aligned=False)
    made.on_gpu = True
    made._run_through_triton([x])
    before = ["compiled"] * count + ["loaded"] * count if together else []
    assert done[: len(before)] == before
    assert [what[0] for what in done[len(before) :]] == ["launched"] * count


def test_a_plan_that_triton_launches_every_time_is_compiled_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    done, x = [], torch.ones(4)
    made = Plan([Launch(Kernel(done), 3, (x,), {}) for _ in range(2)], [x], Workspace(x.device), aligned=False)
    made.on_gpu = True
    for _ in range(2):
        made._run_through_triton([x])
    assert done.count("loaded") == 2
    assert len(done) == 8


def test_tensors_of_a_pass_that_only_compiles_are_not_kept():
    x = torch.ones(4)
    made, there = plan([Kernel([])], torch.ones(4)), weakref.ref(x)
    with compile_only():
        made.run([x])
        del x
        assert there() is None


def test_an_error_of_a_compilation_is_raised_and_leaves_nothing_behind():
    done, x = [], torch.ones(4)
    broken = plan([Kernel(done, error=ValueError("no such layout"))], x)
    with pytest.raises(ValueError, match="no such layout"), compile_only():
        broken.run([x])
    good = plan([Kernel(done)], x)
    with compile_only():
        good.run([x])
    assert done == ["compiled", "loaded"]


class CachedKernel(Kernel):
    """Cached from the moment that its compilation is asked for, as by Triton 3.7."""

    def warmup(self, *arguments, grid, **constants):
        self.cached = super().warmup(*arguments, grid=grid, **constants)
        return self.cached

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.cached.result() and self.done.append("launched")


@pytest.mark.parametrize("error", [KeyError("of the pass"), KeyboardInterrupt()], ids=repr)
def test_after_an_error_kernels_that_were_not_compiled_yet_can_be_launched(error, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    done, x, together = [], torch.ones(4), threading.Barrier(2)
    made = plan([CachedKernel(done, together), CachedKernel(done)], x)

    def fail():
        made.run([x])
        raise error

    with pytest.raises(type(error)), compile_only():
        fail()
    together.wait(10)  # The first kernel is being compiled, and the second waits for its thread.
    made.run([x])
    assert done.count("launched") == 2


def test_after_an_error_of_one_kernel_others_can_be_launched(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    done, x = [], torch.ones(4)
    broken, good = CachedKernel(done, error=ValueError("no such layout")), CachedKernel(done)
    made = plan([good], x)
    with pytest.raises(ValueError, match="no such layout"), compile_only():
        plan([broken, good], x).run([x])
    made.run([x])
    assert done == ["compiled", "launched"]


def test_an_error_of_the_pass_ends_it():
    done, x = [], torch.ones(4)
    made = plan([Kernel(done)], x)
    with pytest.raises(KeyError), compile_only():
        {}[made.run([x])]
    made.run([x])
    assert [what[0] for what in done if what != "compiled"] == ["launched"]
