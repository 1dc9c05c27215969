"""Runs Gluon kernels for Hopper GPUs as Python on a CPU, which Triton's interpreter cannot: tiles are torch tensors.

    with emulated(late=True) as names: ...

Numbers are float64, whatever a kernel asks for, so results are exact but for roundings of the workspace, which is float32.
It shows wrong rows, tiles, masks and sums, waits that never end, and most races (`machine.py`). It does not show what the
compiler makes of a kernel, nor races between the warps of one warpgroup.
"""

import builtins
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.core import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable

from longstride.attention.kernels import backward, hopper, primitives
from longstride.attention.kernels.hopper import ring
from longstride.attention.kernels.launch import Descriptor, Launch, TensorIndex
from longstride.model import product_kernels
from tests.attention.kernels.hopper.machine import Machine
from tests.attention.kernels.hopper.values import (
    HALF,
    LAYOUT,
    SINGLE,
    Number,
    Pointer,
    Values,
    View,
    larger,
    load,
    store,
    values,
    where,
    written_once,
)

MODULES: list[ModuleType] = [
    backward, primitives, product_kernels,
    *(import_module(f"{hopper.__name__}.{found.name}") for found in iter_modules(hopper.__path__))
]  # fmt: skip
PLAIN = backward.backward_row_stats, backward.backward_sum_parts
"""Of the Hopper backend, in plain Triton."""


def language(machine: Machine, program: int, programs: int) -> Any:
    """triton.language, and Gluon's."""

    def full(shape: Sequence[int], value: float, *_: Any) -> Values:
        return values(torch.full(tuple(map(int, shape)), value, dtype=torch.float64))

    def layout(*_: Any, **__: Any) -> Any:
        return LAYOUT

    return SimpleNamespace(
        constexpr=lambda x: x, int32=None, int64=None, float32=SINGLE,
        static_range=lambda *ends: map(Number, builtins.range(*ends)),
        SliceLayout=layout, BlockedLayout=layout, SwizzledSharedLayout=layout, DotOperandLayout=layout,
        NVMMADistributedLayout=layout, NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
        program_id=lambda axis: Number(program), num_programs=lambda axis: Number(programs),
        allocate_shared_memory=machine.allocate, warp_specialize=machine.specialize,
        arange=lambda start, end, layout=None: values(torch.arange(int(start), int(end))),
        zeros=lambda shape, *_: full(shape, 0.0), full=full, where=where, load=load, store=store,
        exp2=torch.exp2, log2=torch.log2, sum=torch.sum, max=lambda x, axis: x.amax(axis),
        maximum=larger(max, torch.maximum), minimum=larger(min, torch.minimum),
        convert_layout=lambda x, layout: x, permute=torch.permute, reshape=torch.reshape, split=lambda x: x.unbind(-1),
    )  # fmt: skip


def _python(x: Any) -> Any:
    """What stands for a part of a kernel's module, if it is not what it is."""
    if isinstance(x, JITCallable | InterpretedFunction):
        return x.fn
    if isinstance(x, constexpr):
        return Number(x.value) if type(x.value) is int else x.value
    return x


_methods = {name: method.fn for name, method in vars(ring.Ring).items() if isinstance(method, JITCallable)}
Ring = type("Ring", (), _methods | {"__init__": ring.Ring.hash_attrs[0].fn})
"""As `ring.Ring`, whose methods Triton compiles."""


@contextmanager
def _as_python(machine: Machine, program: int, programs: int) -> Iterator[None]:
    """The kernels' modules are Python in this context."""
    triton = language(machine, program, programs)
    fakes = {
        "gl": triton, "tl": triton, "Ring": Ring,
        "range": lambda *ends: map(Number, builtins.range(*map(int, ends))),
        "mbarrier": SimpleNamespace(
            init=machine.init, expect=machine.expect, wait=machine.wait, arrive=machine.arrive, MBarrierLayout=int
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.copy_in, async_copy_shared_to_global=machine.copy_out,
            store_wait=machine.store_wait,
        ),
        "fence_async_shared": machine.fence, "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait_products, "reciprocal": torch.reciprocal,
    }  # fmt: skip
    patches = []
    for module in MODULES:
        for name, value in ({"range": None} | vars(module)).items():
            other = fakes.get(name, _python(value))
            if other is not value:
                patches.append(patch.object(module, name, other, create=name == "range"))
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


@contextmanager
def emulated(late: bool, programs: int | None = None) -> Iterator[list[str]]:
    """Context in which plans launch Hopper kernels here; Triton's interpreter runs others. Yields their names, as they run.

    Tensors of half precision are float64. late: as in `machine.py`. programs: of each kernel, instead of what a launch says.
    """
    names: list[str] = []
    interpret = Launch.through_triton

    def launch(one: Launch, tensors: Sequence[Tensor]) -> None:
        is_gluon = isinstance(one.kernel, GluonJITFunction)
        if is_gluon or one.kernel in PLAIN:
            names.append(one.kernel.fn.__name__)
            _run(one, tensors, programs if is_gluon and programs else one.programs, late)
        else:
            interpret(one, tensors)

    with patch.object(Launch, "through_triton", launch):
        yield names


def _run(launch: Launch, tensors: Sequence[Tensor], programs: int, late: bool) -> None:
    """The last program comes first, which shows one that writes into the rows of a later one."""
    constants = {name: _constant(x) for name, x in launch.constants.items() if name not in ("num_warps", "maxnreg")}
    with written_once():
        for program in reversed(range(programs)):
            machine = Machine(late, seed=program)
            with _as_python(machine, program, programs):
                launch.kernel.fn(*(_argument(x, tensors) for x in launch.arguments), **constants)
                machine.finish()


def _constant(x: Any) -> Any:
    return type(x)(*map(_constant, x)) if isinstance(x, tuple) else Number(x) if type(x) is int else _python(x)


def _argument(x: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(x, TensorIndex):
        x = tensors[x.number]
    if isinstance(x, Descriptor):
        tensor = tensors[x.tensor.number]
        dtype = SINGLE if tensor.dtype == torch.float32 else HALF
        return View(tensor.as_strided(x.shape, x.strides, tensor.storage_offset() + x.first), x.block, dtype)
    if isinstance(x, Tensor):
        return Pointer(torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0), x.storage_offset())
    if isinstance(x, tuple):
        return type(x)(*(_argument(part, tensors) for part in x))
    return Number(x) if isinstance(x, int) else x
