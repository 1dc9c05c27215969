"""Training speed: bytes per second, and the fraction of the device's matrix product rate."""

from time import perf_counter
from typing import Any

import torch

from longstride.common.device import GIB
from longstride.model.cost import step_flops
from longstride.training.config import TrainConfig

SIZE = 8192
REPEATS = 5


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Measures the flops per second of a large matrix product on a GPU; None on other devices, and if it does not fit."""
    if device.type != "cuda":
        return None
    try:
        return _measured_rate(device, dtype)
    except torch.OutOfMemoryError:  # A small network needs less memory, and may have been given less.
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # Do not count these matrices.


def _measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(SIZE, SIZE, device=device).to(dtype) for _ in range(2))
    torch.matmul(a, b)
    torch.cuda.synchronize(device)
    begun = perf_counter()
    for _ in range(REPEATS):
        torch.matmul(a, b)
    torch.cuda.synchronize(device)
    return REPEATS * 2 * SIZE**3 / (perf_counter() - begun)


def peak_memory(device: torch.device) -> int | None:
    """Returns the peak bytes of tensors on a GPU; None on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class Speed:
    """Speed of the steps since the last line of metrics."""

    def __init__(self, config: TrainConfig, rate: float | None, device: torch.device, processes: int = 1) -> None:
        self.config, self.rate, self.device = config, rate, device
        self.flops = config.batch * step_flops(config.model) / processes
        self.begun = perf_counter()
        self.restart(0.0)

    def restart(self, waited: float) -> None:
        self.since, self.waited, self.steps = perf_counter(), waited, 0

    def row(self, step: int, waited: float) -> dict[str, Any]:
        """Returns the speed metrics. `waited`: total seconds spent waiting for data."""
        seconds = perf_counter() - self.since
        step_seconds = seconds / self.steps
        metrics: dict[str, Any] = {
            "bytes_per_second": self.config.batch * self.config.model.context / step_seconds,
            "seconds_per_step": step_seconds,
            "seconds_left": step_seconds * (self.config.steps - step),
            "loader_share": (waited - self.waited) / seconds,
        }
        if self.rate is not None:
            metrics["matrix_share"] = self.flops / step_seconds / self.rate
        used = peak_memory(self.device)
        if used is not None:
            metrics["memory_gib"] = used / GIB
        return metrics
