"""Autocast: the inputs of `attend` are cast to the region's dtype, and the implementations run with autocast disabled."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, is_autocast_enabled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def autocast_is_enabled(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and is_autocast_enabled(kind)


def cast_as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to the dtype of the autocast region, as for a matrix product; float64 is left alone."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which autocast is disabled for the device."""
    return torch.autocast(device.type, enabled=False) if autocast_is_enabled(device) else nullcontext()
