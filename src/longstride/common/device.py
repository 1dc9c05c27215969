"""Device choice ("auto" is the GPU if there is one), device memory, and a description of the machine."""

import ctypes
import os
import platform
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

from longstride.version import __version__

GIB = 2**30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of the GNU C library. Its manual allows 32 MiB at most for the second; version 2.36 takes more."""


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory, as a GPU's allocator and jemalloc do. Returns whether it does.

    Otherwise each large result on a CPU costs page faults, a tenth of the time of a small network's training step.
    """
    try:
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        return any(library.mallopt(M_MMAP_THRESHOLD, value) for value in (2**30, 2**25))
    except (OSError, AttributeError):
        return False  # Another C library.


def choose_device(owner: str, name: str) -> torch.device:
    """Returns the device, once a tensor could be made on it; ValueError otherwise. `owner` names the caller in the error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError:  # PyTorch's message lists twenty types that few machines have.
        known = "give auto, cpu, cuda or cuda:1"
        raise ValueError(f"{owner}: device = {name!r} cannot be used: there is no such device; {known}") from None
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{owner}: device = {name!r} cannot be used: {reason}") from None
    return torch.device(name)


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the CPU to a device. On a GPU the copy is from pinned memory, which does not wait for earlier
    work."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def memory_bytes(device: torch.device) -> int | None:
    """Total memory of the GPU, or of the machine for the CPU; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


@lru_cache(maxsize=16)
def prefers_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies matrices much faster in bfloat16 than in float32: it has instructions for that."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and not {"avx512_bf16", "amx_bf16"}.isdisjoint(_processor_field("flags").split())


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Describes hardware and versions, for files that record a measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"triton": version("triton")} if device.type == "cuda" else {}),
        "longstride": __version__,
    }


def _processor() -> str:
    return _processor_field("model name") or platform.processor() or platform.machine()


def _processor_field(name: str) -> str:
    """Returns what Linux says of the first processor; nothing on another system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
