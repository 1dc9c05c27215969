"""Time and peak memory of a call, on a CPU or a GPU."""

import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
CACHE_BYTES = 2**28
"""More than the cache of any GPU."""
QUEUE_CYCLES = 10_000_000
"""About five milliseconds, more than any call here takes to be queued."""


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory, as a GPU's allocator and jemalloc do.

    Otherwise the times of all contenders on a CPU include the page faults of their results.
    """
    try:
        library = ctypes.CDLL("libc.so.6")
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(parameter, 2**31 - 1)
    except (OSError, AttributeError):
        pass  # Another C library: times include page faults.


def seconds_each(calls: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """The median time of each call. Calls take turns, so that slow phases of the machine affect all of them."""
    for call in calls.values():
        call()
    time_one = _seconds_on_gpu if device.type == "cuda" else _seconds
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(time_one(call, device))
    return {name: median(values) for name, values in times.items()}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    start = perf_counter()
    call()
    if device.type == "mps":
        torch.mps.synchronize()
    return perf_counter() - start


def _seconds_on_gpu(call: Callable[[], Any], device: torch.device) -> float:
    """GPU time with a cold cache. The GPU sleeps until the call is queued, so that the launch is not timed."""
    with torch.cuda.device(device):
        torch.empty(CACHE_BYTES, dtype=torch.int8, device=device).zero_()
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device: bytes read and written by a copy, and flops of a matrix product."""

    bytes_per_second: float
    flops_per_second: float


def ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    times = seconds_each({"copy": lambda: target.copy_(source), "product": lambda: left @ right}, 9, device)
    return Ceilings(2 * source.nbytes / times["copy"], 2 * size**3 / times["product"])


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of a call, beyond what was allocated before it."""
    call()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Otherwise the profiler logs its own start and stop.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    held = peak = 0
    for size in _allocations(recorded):
        held += size
        peak = max(peak, held)
    return peak


def _allocations(recorded: profile) -> list[int]:
    """Every allocation (+) and release (-) of memory, in bytes and in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(changes, key=lambda event: event["ts"])]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The a in values ~ sizes ** a, by least squares on the logarithms."""
    x, y = [log(size) for size in sizes], [log(value) for value in values]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / sum((a - x_mean) ** 2 for a in x)
