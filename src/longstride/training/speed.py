"""How fast a step is: bytes per second, and the share of the device's matrix rate."""

from time import perf_counter

import torch

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
