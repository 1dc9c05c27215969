"""How fast a step is: bytes per second, and the share of the device's matrix rate."""

from time import perf_counter
from typing import Any

import torch

from longstride.model.cost import step_flops
from longstride.training.config import TrainConfig

GIB = 2**30
SIZE = 8192
REPEATS = 5


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Flops per second of a large product, measured; only on a GPU, where it takes a moment."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(SIZE, SIZE, device=device).to(dtype) for _ in range(2))
    torch.matmul(a, b)
    torch.cuda.synchronize(device)
    begun = perf_counter()
    for _ in range(REPEATS):
        torch.matmul(a, b)
    torch.cuda.synchronize(device)
    taken = perf_counter() - begun
    del a, b
    torch.cuda.reset_peak_memory_stats(device)  # These matrices are not the model's.
    return REPEATS * 2 * SIZE**3 / taken


def memory(device: torch.device) -> int | None:
    """The most bytes that tensors took on a GPU so far."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class Speed:
    """How fast the steps since the last line of metrics were."""

    def __init__(self, config: TrainConfig, rate: float | None, device: torch.device, processes: int = 1) -> None:
        self.config, self.rate, self.device = config, rate, device
        self.flops = config.batch * step_flops(config.model) / processes
        self.begun = perf_counter()
        self.restart(0.0)

    def restart(self, waited: float) -> None:
        self.since, self.waited, self.steps = perf_counter(), waited, 0

    def row(self, step: int, waited: float) -> dict[str, Any]:
        seconds = perf_counter() - self.since
        each = seconds / self.steps
        found: dict[str, Any] = {
            "bytes_per_second": self.config.batch * self.config.model.context / each,
            "seconds_per_step": each,
            "seconds_left": each * (self.config.steps - step),
            "loader_share": (waited - self.waited) / seconds,
        }
        if self.rate is not None:
            found["matrix_share"] = self.flops / each / self.rate
        used = memory(self.device)
        if used is not None:
            found["memory_gib"] = used / GIB
        return found
