"""Marks: moments in the order of a device's work, which time that work. A GPU reaches a mark long after it was set."""

import time
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment at which all work that was asked for before is done."""

    def seconds_since(self, earlier: Any) -> float:
        """Returns the seconds from an earlier mark of the same device to this one. Waits until the device has reached it."""


class HostMark:
    """A mark of a device that has done its work when a call returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def seconds_since(self, earlier: "HostMark") -> float:
        return self.seconds - earlier.seconds


class GpuMark:
    """A mark in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: "GpuMark") -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000


def set_mark(device: torch.device) -> Mark:
    return GpuMark(device) if device.type == "cuda" else HostMark()
