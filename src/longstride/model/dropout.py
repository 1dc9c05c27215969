"""Dropout masks that follow from a seed.

A seed is a number on the device. Recomputation draws the same mask from it again, without the state of a generator, which
cannot be saved while a CUDA graph is captured.
"""

from typing import Any

import torch
from torch import Tensor

from longstride.attention.implementation import HAS_TRITON
from longstride.model.operators import OPS, define


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Draws the seeds of `count` blocks from the default generator, [count, 2]."""
    return torch.randint(2**63 - 1, (count, 2), device=device)


def draw_mask(x: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """Draws a mask for a tensor like x: True where it is kept."""
    mask: Tensor = OPS.dropout_mask(seed, x.shape, 1 - dropout)
    return mask


def _mask(seed: Tensor, size: list[int], keep: float) -> Tensor:
    mask = torch.empty(size, dtype=torch.bool, device=seed.device)
    if not (seed.is_cuda and HAS_TRITON):
        return mask.bernoulli_(keep, generator=torch.Generator(seed.device).manual_seed(int(seed)))
    from longstride.model.dropout_kernel import fill_mask

    with torch.cuda.device(seed.device):
        fill_mask(mask, seed, keep)
    return mask


def _mask_like(seed: Tensor, size: list[Any], keep: float) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=seed.device)


define("dropout_mask(Tensor seed, SymInt[] size, float keep) -> Tensor", _mask, _mask_like)
