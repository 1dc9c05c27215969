"""Pinned host memory that is ready soon: threads touch its pages, large ones where the system has them, before CUDA pins it.

`torch.empty(pin_memory=True)` asks CUDA for memory, which one thread clears, and rounds sizes up to powers of two.
"""

import mmap
import weakref
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


class PinError(MemoryError):
    """Host memory could not be had, or not be pinned."""


def pinned(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros in host memory of exactly the bytes that it needs, pinned for copies from and to a GPU.

    PinError if that fails."""
    size = max(1, prod(shape) * dtype.itemsize)
    try:
        return _pinned(size, device)[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
    except (OSError, torch.cuda.CudaError) as error:
        reason = str(error).split("\n", 1)[0]
        raise PinError(f"{size / 2**30:.2f} GiB of host memory could not be pinned: {reason}.") from error


def _pinned(size: int, device: torch.device) -> Tensor:
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A system without large pages.
            pages.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(pages)
    made = torch.frombuffer(view, dtype=torch.uint8).zero_()
    address = made.data_ptr()
    with torch.cuda.device(device):  # A thread that begins has the first device.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, made.nbytes, 0))
    weakref.finalize(view, _unregister, address, pages).atexit = False
    return made


def _unregister(address: int, pages: mmap.mmap) -> None:
    """`pages`: given, so that they are still mapped."""
    torch.cuda.cudart().cudaHostUnregister(address)
