"""Compiled kernels launched by the CUDA driver, with a buffer of parameters in which only addresses change.

Triton passes what a kernel's signature lists, one parameter after the other: addresses, numbers, and for a tensor descriptor
a tensor map, its shape and its strides; then the addresses of two scratch buffers, which are not used here. The driver
reports offset and size of each parameter. If they are not as expected, `UnsupportedError` is raised, and Triton launches the
kernel.
"""

import ctypes
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MAP_BYTES = 128
"""Size and alignment of a tensor map (CUtensorMap)."""
FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""
L2_128_BYTES = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0
"""CU_LAUNCH_PARAM_..."""
NO_CONTEXT = (3, 201)
"""CUDA_ERROR_NOT_INITIALIZED and CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU yet."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class UnsupportedError(Exception):
    """This kernel must be launched by Triton."""


@lru_cache(maxsize=1)
def cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuFuncGetParamInfo  # noqa: B018  Drivers before CUDA 12.4 have no such function.
    except (OSError, AttributeError) as error:
        raise UnsupportedError(str(error)) from None
    pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuFuncGetParamInfo.argtypes = [pointer, size, pointer, pointer]
    library.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    library.cuTensorMapEncodeTiled.argtypes = [
        pointer, number, number, pointer, pointer, pointer, pointer, pointer, number, number, number, number,
    ]  # fmt: skip
    return library


class DriverLaunch:
    """A compiled kernel that is launched many times, each time with other tensor addresses."""

    def __init__(self, kernel: Any, programs: int, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """`arguments`: of a `launch.Launch`, with placeholders; `tensors`: the tensors of one run, for the placeholders."""
        metadata = kernel.metadata
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise UnsupportedError("clusters or scratch memory")
        if getattr(metadata, "launch_pdl", False) or getattr(metadata, "launch_cooperative_grid", False):
            raise UnsupportedError("programmatic or cooperative launch")
        self._kernel = kernel  # Keeps the module loaded.
        parameters = _parameters(kernel.function)
        size = sum(parameters[-1]) if parameters else 0
        memory = bytearray(size + 2 * MAP_BYTES)
        self._pinned = (ctypes.c_char * len(memory)).from_buffer(memory)  # While this exists, the memory cannot move.
        start = -ctypes.addressof(self._pinned) % MAP_BYTES
        self._buffer = memoryview(memory)[start : start + (size + MAP_BYTES) // 8 * 8]
        self._address = ctypes.addressof(self._pinned) + start
        self._pointers: list[tuple[int, int]] = []
        """For each pointer: its 8-byte word in the buffer, and the index of its tensor."""
        self._maps: list[list[int]] = []
        """For each tensor map: its address, its tensor's index, the view's offset in bytes, and the address in it now."""
        self._constants: list[Tensor] = []
        self._fill(kernel, arguments, parameters, tensors)
        self._words = self._buffer.cast("Q")
        self._size = ctypes.c_size_t(size)
        extra = [BUFFER_POINTER, self._address, BUFFER_SIZE, ctypes.addressof(self._size), END]
        self._extra = (ctypes.c_void_p * len(extra))(*extra)
        self._launch = cuda().cuLaunchKernel
        self._replace = cuda().cuTensorMapReplaceAddress
        self._before = (kernel.function, programs, 1, 1, metadata.num_warps * 32, 1, 1, metadata.shared)
        self._after = (None, ctypes.addressof(self._extra))
        self._lock = threading.Lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        with self._lock:  # The driver reads the buffer before cuLaunchKernel returns.
            for word, tensor in self._pointers:
                self._words[word] = addresses[tensor]
            for entry in self._maps:
                place, tensor, first, now = entry
                address = addresses[tensor] + first
                if address != now:
                    _check(self._replace(place, address))
                    entry[3] = address
            code = self._launch(*self._before, stream, *self._after)
            if code in NO_CONTEXT:
                torch.cuda.set_device(torch.cuda.current_device())  # Gives this thread a context.
                code = self._launch(*self._before, stream, *self._after)
        if code:
            _check(code)

    def _fill(
        self, kernel: Any, arguments: Sequence[Any], parameters: list[tuple[int, int]], tensors: Sequence[Tensor]
    ) -> None:
        descriptions = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
        places = iter(parameters)

        def take(size: int) -> int:
            offset, there = next(places, (-1, -1))
            if there != size:
                raise UnsupportedError(f"a parameter of {there} bytes where one of {size} was expected")
            return offset

        for kind, argument in _flatten(kernel.src.signature.values(), arguments):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                offset = take(8)
                if isinstance(argument, Tensor):
                    self._constants.append(argument)
                    struct.pack_into("Q", self._buffer, offset, argument.data_ptr())
                else:
                    self._pointers.append((offset // 8, argument.number))
            elif kind.startswith("tensordesc"):
                description = next(descriptions, None)
                if description is None:
                    raise UnsupportedError("a tensor descriptor without a tensor map")
                place = self._address + take(MAP_BYTES)
                tensor = tensors[argument.tensor.number]
                first = argument.first * tensor.element_size()
                _encode(place, tensor.data_ptr() + first, tensor.dtype, argument, description)
                self._maps.append([place, argument.tensor.number, first, tensor.data_ptr() + first])
                for number in argument.shape:
                    struct.pack_into("i", self._buffer, take(4), number)
                for number in argument.strides:
                    struct.pack_into("q", self._buffer, take(8), number)
            elif kind in FORMATS:
                struct.pack_into(FORMATS[kind], self._buffer, take(struct.calcsize(FORMATS[kind])), argument)
            else:
                raise UnsupportedError(f"a parameter of type {kind}")
        for _ in range(2):
            struct.pack_into("Q", self._buffer, take(8), 0)
        if next(places, None) is not None or next(descriptions, None) is not None:
            raise UnsupportedError("more parameters than expected")


def _parameters(function: int) -> list[tuple[int, int]]:
    """Returns offset and size of each parameter of a kernel, from the driver."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not cuda().cuFuncGetParamInfo(function, len(found), ctypes.addressof(offset), ctypes.addressof(size)):
        found.append((offset.value, size.value))
    return found


def _flatten(types: Any, arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields type and value of each parameter. Tuples are flattened."""
    for kind, argument in zip(types, arguments):
        if isinstance(kind, tuple):
            yield from _flatten(kind, argument)
        else:
            yield kind, argument


def _encode(place: int, address: int, dtype: torch.dtype, view: Any, description: Any) -> None:
    """Writes the tensor map of a `launch.Descriptor`. In a tensor map the innermost dimension comes first."""
    rank = len(view.shape)
    shape = (ctypes.c_uint64 * rank)(*reversed(view.shape))
    strides = (ctypes.c_uint64 * rank)(*(stride * dtype.itemsize for stride in reversed(view.strides[:-1])), 0)
    block = (ctypes.c_uint32 * rank)(*reversed(description["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    code = cuda().cuTensorMapEncodeTiled(
        place, MAP_TYPES[dtype], rank, address, *(ctypes.addressof(x) for x in (shape, strides, block, ones)), 0,
        description["swizzle"], L2_128_BYTES, 0,
    )  # fmt: skip
    if code:
        raise UnsupportedError(f"cuTensorMapEncodeTiled gave {code}")


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        cuda().cuGetErrorString(code, ctypes.byref(text))
        message = re.sub(r"\s+", " ", (text.value or b"unknown error").decode())
        raise RuntimeError(f"attend: a kernel launch failed: CUDA error {code}, {message}")


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Context in which this thread can load kernels and allocate memory while it captures a CUDA graph."""
    try:
        exchange = cuda().cuThreadExchangeStreamCaptureMode
    except UnsupportedError:  # Not NVIDIA's driver: the capture says itself what it does not allow.
        yield
        return
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
