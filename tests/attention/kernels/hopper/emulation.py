"""Runs the Gluon kernels of walks as Python on a CPU, which Triton's interpreter cannot: tiles are torch tensors.

Copies take place at once, so this shows wrong rows, tiles, masks and phases, and waits that would never end. It does not
show a missing barrier or fence. Shared memory begins as NaN. Numbers are float64, whatever the kernel asks for.
"""

import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.language.core import constexpr
from triton.runtime.jit import JITCallable

from longstride.attention.kernels.hopper import (
    lane_tiles,
    pair_gradients,
    ring,
    tiles,
    walk_backward,
    walk_documents,
    walk_forward,
)
from longstride.attention.kernels.launch import Descriptor, Launch

MODULES = (lane_tiles, pair_gradients, ring, tiles, walk_backward, walk_documents, walk_forward)


class Number(int):
    """A scalar of a kernel. Quotients round towards 0."""

    def to(self, dtype: Any) -> "Number":
        return self


def _operator(name: str) -> Any:
    def apply(self: int, other: Any) -> Any:
        result = getattr(int, name)(int(self), int(other)) if isinstance(other, int) else NotImplemented
        return Number(result) if isinstance(result, int) else result

    return apply


for _name in ("add", "sub", "mul", "and", "or", "rshift"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))
Number.__floordiv__ = lambda self, other: Number(abs(self) // other * (-1 if self < 0 else 1))  # type: ignore[method-assign]
Number.__mod__ = lambda self, other: Number(int(self) - self // other * other)  # type: ignore[method-assign]
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Values(Tensor):
    """A tensor of a kernel."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> "Values":
        return self


def values(x: Tensor) -> Values:
    return x.as_subclass(Values)


class Pointer(NamedTuple):
    data: Tensor
    offset: Any = 0

    def __add__(self, distance: Any) -> "Pointer":  # type: ignore[override]
        return Pointer(self.data, self.offset + distance)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=None)


class Memory(NamedTuple):
    """A part of shared memory."""

    data: Tensor

    @property
    def shape(self) -> Any:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return None

    def index(self, place: int) -> "Memory":  # type: ignore[override]
        assert 0 <= place < len(self.data)
        return Memory(self.data[int(place)])

    def slice(self, start: int, count: int) -> "Memory":
        return Memory(self.data[start : start + count])

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory(self.data.permute(order))

    def load(self, layout: Any) -> Values:
        return values(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Memory":
        return Memory(self.data.view(shape))


class View(NamedTuple):
    """A tensor descriptor: [batch, heads, lanes, length, d], and the block of a copy."""

    data: Tensor
    block_shape: Sequence[int]

    @property
    def dtype(self) -> Any:
        return None

    @property
    def layout(self) -> Any:
        return None

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=self.block_shape)

    def box(self, place: Sequence[int]) -> tuple[Any, Any] | None:
        """The part of a block that is inside: where it lies in the tensor, and in the block."""
        there, here = [], []
        for start, count, size in zip(map(int, place), self.block_shape, self.data.shape):
            first, last = max(start, 0), min(start + count, size)
            if first >= last:
                return None
            there.append(slice(first, last))
            here.append(slice(first - start, last - start))
        return tuple(there), tuple(here)


class Barriers:
    """The mbarriers of a program: bytes that are awaited, and how many phases are over, by address."""

    def __init__(self) -> None:
        self.state: dict[int, list[int]] = {}

    def init(self, barrier: Memory, count: int) -> None:
        self.state[barrier.data.data_ptr()] = [0, 0]

    def expect(self, barrier: Memory, size: int, pred: Any = True) -> None:
        if pred:
            state = self.state[barrier.data.data_ptr()]
            assert not state[0]
            state[0] = int(size)

    def arrive(self, barrier: Memory, size: int) -> None:
        state = self.state[barrier.data.data_ptr()]
        state[0] -= size
        assert state[0] >= 0
        state[1] += not state[0]

    def wait(self, barrier: Memory, phase: int) -> None:
        pending, over = self.state[barrier.data.data_ptr()]
        assert not pending
        assert over
        assert (over - 1) % 2 == phase, "would wait for ever"

    def copy_in(self, view: View, place: Sequence[int], barrier: Memory, target: Memory, pred: Any = True) -> None:
        if not pred:
            return
        block = target.data.zero_()
        box = view.box(place)
        if box is not None:
            block[box[1]] = view.data[box[0]]
        self.arrive(barrier, 2 * block.numel())

    @staticmethod
    def copy_out(view: View, place: Sequence[int], source: Memory) -> None:
        box = view.box(place)
        assert box is not None
        view.data[box[0]] = source.data[box[1]]


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    flat = pointer.data
    if not isinstance(pointer.offset, Tensor):
        return Number(flat[int(pointer.offset)]) if mask else Number(other)
    mask = torch.as_tensor(mask).bool().expand(pointer.offset.shape)
    found = torch.full(pointer.offset.shape, float(other), dtype=torch.float64)
    found[mask] = flat[pointer.offset[mask]].double()
    return values(found)


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.bool().expand(value.shape)
    pointer.data[pointer.offset[mask].as_subclass(Tensor)] = value[mask].as_subclass(Tensor).to(pointer.data.dtype)


def where(condition: Any, x: Any, y: Any) -> Any:
    if not any(isinstance(part, Tensor) for part in (condition, x, y)):
        return x if condition else y
    kind = torch.float64 if any(isinstance(part, float) or torch.is_tensor(part) for part in (x, y)) else torch.int64
    parts = [part if isinstance(part, Tensor) else torch.tensor(part, dtype=kind) for part in (x, y)]
    condition = condition if isinstance(condition, Tensor) else torch.tensor(bool(condition))
    return values(torch.where(condition, *parts))


def multiply(left: Any, right: Memory, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Values:
    product = (left.data if isinstance(left, Memory) else left) @ right.data
    return values(product + total if use_acc else product)


def maximum(x: Any, y: Any) -> Any:
    return values(torch.fmax(torch.as_tensor(x), torch.as_tensor(y)))


def language(program: int, programs: int) -> Any:
    def full(shape: Sequence[int], value: float, *_: Any) -> Values:
        return values(torch.full(tuple(shape), value, dtype=torch.float64))

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return SimpleNamespace(
        constexpr=Any, int32=None, int64=None, float32=None, static_range=range,
        SliceLayout=nothing, BlockedLayout=nothing, SwizzledSharedLayout=nothing, DotOperandLayout=nothing,
        NVMMADistributedLayout=nothing, NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        program_id=lambda axis: Number(program), num_programs=lambda axis: Number(programs),
        allocate_shared_memory=lambda dtype, shape, layout: Memory(
            torch.full(tuple(shape), torch.nan, dtype=torch.float64)
        ),
        arange=lambda start, end, layout: values(torch.arange(start, end)),
        zeros=lambda shape, *_: full(shape, 0.0), full=full, where=where, load=load, store=store,
        exp2=torch.exp2, log2=torch.log2, sum=torch.sum, max=lambda x, axis: x.amax(axis), maximum=maximum,
        convert_layout=lambda x, layout: x,
    )  # fmt: skip


@contextmanager
def emulated(program: int, programs: int) -> Iterator[None]:
    """The kernels' modules are Python in this context."""
    barriers = Barriers()
    fakes = {
        "gl": language(program, programs),
        "range": lambda start, end: map(Number, builtins.range(start, end)),
        "mbarrier": SimpleNamespace(init=barriers.init, expect=barriers.expect, wait=barriers.wait, MBarrierLayout=int),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=barriers.copy_in, async_copy_shared_to_global=barriers.copy_out,
            store_wait=lambda pending: None,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        "without_keys": lambda lse: where(lse == -torch.inf, torch.inf, lse),
    }  # fmt: skip
    patches = []
    for module in MODULES:
        names = {"range": None} | vars(module)
        for name, value in names.items():
            if name in fakes:
                patches.append(patch.object(module, name, fakes[name], create=name == "range"))
            elif isinstance(value, JITCallable):
                patches.append(patch.object(module, name, value.fn))
            elif isinstance(value, constexpr):
                patches.append(patch.object(module, name, value.value))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def run(launch: Launch, programs: int) -> None:
    """Runs a launch of a walk, with so many programs; its tensors are float64. The last program comes first, which shows one
    that writes into the rows of a later one."""
    walk = launch.constants["WALK"]
    walk = type(walk)(*(x.value for x in walk))
    function, flags = launch.kernel.fn, {name: x for name, x in launch.constants.items() if isinstance(x, bool)}
    for program in reversed(range(programs)):
        with emulated(program, programs):
            function(*map(_argument, launch.arguments), walk, **flags)


def _argument(x: Any) -> Any:
    if isinstance(x, Descriptor):
        start = x.tensor.storage_offset() + x.first
        return View(x.tensor.as_strided(x.shape, x.strides, start), x.block)
    if isinstance(x, Tensor):
        return Pointer(torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0), x.storage_offset())
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x))
    return Number(x) if isinstance(x, int) else x
