"""Attention of one new query to its visible cached keys, in plain PyTorch.

Shapes: q [batch, heads, 1, d_qk]; keys [batch, heads, slots, d_qk]; values [batch, heads, slots, d_v]; listed [heads, most],
the slots that each head's query sees, padded with -1.
"""

import torch
from torch import Tensor


def decode(q: Tensor, keys: Tensor, values: Tensor, listed: Tensor, scale: float) -> Tensor:
    """Returns [batch, heads, 1, d_v]; a head whose query sees no key gets 0."""
    head = torch.arange(len(listed), device=q.device)[:, None]
    padding = listed < 0
    # Padding (-1) reads the last slot and is masked.
    scores = (keys[:, head, listed] @ q.transpose(2, 3)).squeeze(3) * scale
    weights = scores.masked_fill(padding, -torch.inf).softmax(-1).masked_fill(padding, 0)
    return weights[:, :, None] @ values[:, head, listed].to(weights.dtype)
