"""Autocast: casts the inputs of `attend` as it would, and is disabled inside the implementations."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast_as_autocast_would(x: Tensor) -> Tensor:
    """Casts to the autocast dtype if autocast is enabled, as for a matrix product; float64 is left alone."""
    if x.dtype not in DTYPES[1:] or x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which autocast is disabled for the device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
