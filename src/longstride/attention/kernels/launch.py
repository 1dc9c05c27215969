"""Plans: kernel launches with all their arguments except the tensors' addresses, made once and run many times.

A `Launch` is a kernel with its grid and arguments. `Plan` replaces the tensors of its launches by their index in a list, so
that it can run again with other tensors of the same shapes, strides and dtypes. Triton compiles and launches the kernels of
the first run. On a GPU, later runs write the addresses into a buffer and pass it to the CUDA driver (`driver.py`): Triton
would inspect every argument again, which takes several times as long as the launch.
"""

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.attention.kernels.compilation import compile_together, only_compiles
from longstride.attention.kernels.driver import DriverLaunch, UnsupportedError, relaxed_capture

MOST_PLANS = 4096
"""Plans in the cache. Beyond this the oldest is dropped, and made again when it is needed."""
MOST_TABLE_BYTES = 2**28
"""Of all their tables, which lie on the device: documents of other lengths have tables of their own, about a megabyte."""


class Descriptor(NamedTuple):
    """A tensor descriptor for TMA, the copy engine of Hopper GPUs: a strided view, which is copied block by block."""

    tensor: Any
    first: int
    """Offset of the view in the tensor, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class TensorIndex(NamedTuple):
    """Placeholder for a tensor: its index in the list that `Plan.run` is given."""

    number: int


@dataclass(frozen=True)
class Launch:
    """A kernel launch. `arguments`: tensors, descriptors, numbers and NamedTuples of these. `constants` are compiled in."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def bound(self, tensors: Sequence[Tensor]) -> "Launch":
        """Returns the launch with placeholders for these tensors. Other tensors (tables) stay: they belong to the plan."""
        places = {id(x): TensorIndex(index) for index, x in enumerate(tensors)}

        def place(argument: Any) -> Any:
            if isinstance(argument, Descriptor):
                return argument._replace(tensor=places[id(argument.tensor)])
            if isinstance(argument, tuple):
                return type(argument)(*map(place, argument))
            return places.get(id(argument), argument) if isinstance(argument, Tensor) else argument

        return Launch(self.kernel, self.programs, tuple(map(place, self.arguments)), self.constants)

    def through_triton(self, tensors: Sequence[Tensor]) -> Any:
        """Launches the kernel, compiling it if need be. Returns the compiled kernel; None in the interpreter."""
        return self.kernel[(self.programs,)](*(_fill(argument, tensors) for argument in self.arguments), **self.constants)

    def compile(self, tensors: Sequence[Tensor]) -> Any:
        """Has Triton compile the kernel that `through_triton` launches. Returns what its `warmup` returns."""
        arguments = (_fill(argument, tensors) for argument in self.arguments)
        return self.kernel.warmup(*arguments, grid=(self.programs,), **self.constants)


def _fill(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns the argument with tensors in place of placeholders. Not a closure: one that calls itself is a reference cycle,
    and would keep the tensors until the next garbage collection."""
    if isinstance(argument, TensorIndex):
        return tensors[argument.number]
    if isinstance(argument, Descriptor):
        return _tensor_descriptor(argument, tensors[argument.tensor.number])
    return type(argument)(*(_fill(part, tensors) for part in argument)) if isinstance(argument, tuple) else argument


def _tables(argument: Any) -> Iterator[Tensor]:
    """Yields the tensors of a bound launch's arguments."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _tables(part)


def _tensor_descriptor(view: Descriptor, tensor: Tensor) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(view.block), dtype)
    start = tensor.as_strided((1,), (1,), tensor.storage_offset() + view.first)
    return TensorDescriptor(start, list(view.shape), list(view.strides), list(view.block), layout)


class Workspace:
    """Temporary tensors that the launches of a plan share, allocated anew in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self._makers: list[Callable[[], Tensor]] = []
        self.named: dict[str, Tensor] = {}
        """Tensors that several passes share, by name."""

    def new(self, *shape: int, zero: bool = False) -> Tensor:
        """Returns a new temporary float32 tensor, as an argument of launches."""
        make = partial(torch.zeros if zero else torch.empty, shape, dtype=torch.float32, device=self.device)
        self._makers.append(make)
        self.tensors.append(make())
        return self.tensors[-1]

    def allocate(self) -> list[Tensor]:
        """Returns the temporary tensors for one run, in the order of `new`."""
        return [make() for make in self._makers]


class Plan:
    """Launches for tensors of given shapes, strides, dtype and device, and the temporary tensors that they share.

    aligned: all tensors begin at multiples of 16 bytes. Triton compiles for this, so it must hold in every run of the plan.
    If not all do, or the driver cannot launch the kernels, Triton launches them every time.
    """

    def __init__(self, launches: Sequence[Launch], tensors: Sequence[Tensor], workspace: Workspace, aligned: bool) -> None:
        self.launches = [launch.bound([*tensors, *workspace.tensors]) for launch in launches if launch.programs]
        self.workspace = workspace if workspace.tensors else None
        workspace.tensors, workspace.named = [], {}  # Keeps their shapes, but not their memory.
        self.aligned = aligned
        tables = {id(x): x.nbytes for launch in self.launches for x in _tables(launch.arguments)}
        self.table_bytes = sum(tables.values())
        device = tensors[0].device
        self.on_gpu = device.type == "cuda"
        self.index = device.index if self.on_gpu else -1
        self.ready: list[DriverLaunch] | None = None
        """Launches by the CUDA driver, from the second run on; None while Triton launches."""
        self.has_run = False

    def run(self, tensors: Sequence[Tensor]) -> None:
        if self.on_gpu and torch._C._cuda_isCurrentStreamCapturing():
            _captured.add(self)
        if self.workspace is not None:
            tensors = [*tensors, *self.workspace.allocate()]
        if self.on_gpu and torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                self._run(tensors)
        else:
            self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> None:
        if self.ready is None:
            _call_untraced(self._run_through_triton, tensors)
            return
        addresses = [x.data_ptr() for x in tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for launch in self.ready:
            launch(addresses, stream)

    def _run_through_triton(self, tensors: Sequence[Tensor]) -> None:
        """The first run; every run, if the driver cannot launch the kernels."""
        kernels = [partial(launch.compile, tensors) for launch in self.launches]
        if only_compiles(self, kernels, self.index):
            return
        with capture_safe(self.on_gpu):
            if self.on_gpu and len(kernels) > 1 and not (self.has_run or torch.cuda.is_current_stream_capturing()):
                compile_together(kernels, self.index)
            compiled = [launch.through_triton(tensors) for launch in self.launches]
            self.has_run = True
            if self.on_gpu and self.aligned:
                try:
                    self.ready = [
                        DriverLaunch(kernel, launch.programs, launch.arguments, tensors)
                        for kernel, launch in zip(compiled, self.launches)
                    ]
                except UnsupportedError:
                    self.aligned = False


def capture_safe(on_gpu: bool) -> AbstractContextManager[None]:
    """Context in which kernels can be loaded and tables copied, also while a CUDA graph is captured."""
    return relaxed_capture() if on_gpu and torch.cuda.is_current_stream_capturing() else nullcontext()


def constant(values: Any, device: torch.device) -> Tensor:
    """Returns an int32 tensor on the device. While a CUDA graph is captured, it is copied at once, outside the graph."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.as_tensor(values, dtype=torch.int32, device=device)
    with relaxed_capture(), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        table = torch.as_tensor(values, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    return table


def _call_untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function without torch.compile, which traces what is called in a frame that it gave up."""
    return (_call_disabled() if "torch._dynamo" in sys.modules else _call)(function, *arguments)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@lru_cache(maxsize=1)
def _call_disabled() -> Callable[..., Any]:
    return torch.compiler.disable(_call)  # type: ignore[no-any-return, no-untyped-call]


_plans: dict[Hashable, Plan] = {}
_changing = threading.Lock()
"""Held while plans are added or dropped."""
_captured: set[Plan] = set()
"""Plans that were run inside a capture, kept for ever: a CUDA graph reads their tables each time it is replayed."""


def plan_for(key: Hashable, make: Callable[[], Plan]) -> Plan:
    """Returns the plan of this key; makes it at the first call."""
    plan = _plans.get(key)
    return _call_untraced(_add, key, make) if plan is None else plan


def _add(key: Hashable, make: Callable[[], Plan]) -> Plan:
    plan = make()
    with _changing:
        _plans[key] = plan
        table_bytes = sum(one.table_bytes for one in _plans.values())
        while len(_plans) > 1 and (len(_plans) > MOST_PLANS or table_bytes > MOST_TABLE_BYTES):
            table_bytes -= _plans.pop(next(iter(_plans))).table_bytes
    return plan


def forget_plans() -> None:
    """Drops all plans. Call it when the kernel settings have changed."""
    with _changing:
        _plans.clear()
