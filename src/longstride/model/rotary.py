"""Rotary positions: queries and keys are rotated by angles proportional to their position.

A head's numbers form pairs, one from its first half and one from its second. Pair p of position i is rotated by the angle
i * 10000^(-p / pairs). The product of a query and a key then depends on their contents and their distance only.
"""

import torch
from torch import Tensor

BASE = 10_000.0


def rotation(position: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns cosines and sines [2, n, size / 2] for positions [n] and heads of this size.

    Angles are float64: at position 1,000,000 a float32 angle would be off by a twentieth.
    """
    pairs = size // 2
    speed = BASE ** (-torch.arange(pairs, device=position.device, dtype=torch.float64) / pairs)
    angle = position.to(torch.float64)[:, None] * speed
    return torch.stack((angle.cos(), angle.sin())).to(dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates queries or keys [batch, heads, n, d], in float32 at least; returns that dtype."""
    cos, sin = rotation
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
