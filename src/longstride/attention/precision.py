"""Autocast: what it means for `attend`, and how to keep it out of the sums."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast_as_autocast_would(x: Tensor) -> Tensor:
    """As autocast treats the inputs of a matrix product: to the region's dtype, float64 left alone."""
    if x.dtype not in DTYPES[1:] or x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Inside, each product has the precision that the code says, whatever the region around it."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
