"""Autocast: casts the inputs of `attend` as it would, and is disabled inside the implementations."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast_as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to the autocast dtype if autocast is enabled, as for a matrix product; float64 is left alone."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which autocast is disabled for the device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
