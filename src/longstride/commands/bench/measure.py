"""Time and memory of a call, on a CPU or a GPU.

Three clocks time a call on a GPU: `gpu_seconds` its kernels alone, `host_seconds` the Python and driver code until the call
returns, and `elapsed_seconds` what triton's do_bench reports. A caller waits for the longer of the last two.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CACHE_BYTES = 2**28
"""More than the cache of any GPU."""
QUEUE_CYCLES = 10_000_000
"""About five milliseconds, more than any call here takes to be queued."""
HOST_CALLS = 20
"""Calls back to back in one measurement of host time: few enough that the GPU's queue of launches never fills."""
HOST_BUDGET = 0.1
"""Seconds that those calls may take together; slow calls are repeated less often, at least 3 times."""
HOST_ROUNDS = 5
"""Rounds of such calls, of which the least time counts: a host that others share only ever adds to it. Calls so slow that
three exceed the budget have one."""

Call = Callable[[], Any]
Clock = Callable[[Call, torch.device], float]
Context = Callable[[], AbstractContextManager[Any]]
Pick = Callable[[list[float]], float]


def seconds_each(
    calls: Mapping[str, Call],
    repeats: int,
    device: torch.device,
    clock: Clock | None = None,
    within: Mapping[str, Context] | None = None,
    pick: Pick = median,
) -> dict[str, float]:
    """The time of each call. The calls take turns, so that slow phases of the machine affect all of them.

    `clock`: left out, `gpu_seconds` on a GPU and wall time elsewhere. `within`: contexts that a call needs; they are entered
    before its time starts. `pick`: which of the repeats counts.
    """
    clock = clock or (gpu_seconds if device.type == "cuda" else _seconds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            with (within or {}).get(name, nullcontext)():
                if number:
                    times[name].append(clock(call, device))
                else:
                    call()
    return {name: pick(values) for name, values in times.items()}


def _seconds(call: Call, device: torch.device) -> float:
    start = perf_counter()
    call()
    if device.type == "mps":
        torch.mps.synchronize()
    return perf_counter() - start


def gpu_seconds(call: Call, device: torch.device) -> float:
    """GPU time from a cold cache. The GPU is kept waiting until the call is in its queue, so launching is not timed."""
    with torch.cuda.device(device):
        torch.empty(CACHE_BYTES, dtype=torch.int8, device=device).zero_()
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def host_seconds(call: Call, device: torch.device) -> float:
    """Time until a call returns: the mean of calls back to back, and of some rounds the least. The GPU may still be working
    when they return."""
    torch.cuda.synchronize(device)
    start = perf_counter()
    call()
    torch.cuda.synchronize(device)
    first = perf_counter() - start
    count = max(3, min(HOST_CALLS, int(HOST_BUDGET / first)))
    rounds = []
    for _ in range(HOST_ROUNDS if count * first <= HOST_BUDGET else 1):
        start = perf_counter()
        for _ in range(count):
            call()
        rounds.append(perf_counter() - start)
        torch.cuda.synchronize(device)
    return min(rounds) / count


def elapsed_seconds(call: Call, device: torch.device) -> float:
    """Time between events around a call, by triton's do_bench: from a cold cache. The GPU clears that before each call, and
    Python may be done with a short call by then."""
    from triton.testing import do_bench  # Only there beside a torch for GPUs.

    with torch.cuda.device(device):
        return float(do_bench(call, warmup=5, rep=20, return_mode="median")) / 1e3


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


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory that a call holds at any moment, on top of what was allocated before it."""
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
