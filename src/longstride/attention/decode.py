"""One new query against its visible cached keys, in plain PyTorch.

Shapes: q [batch, heads, 1, d_qk]; keys [batch, heads, slots, d_qk]; values [batch, heads, slots, d_v]; listed [heads, most],
the slots that each head's query sees, below 0 where there is none.
"""

import torch
from torch import Tensor


def decode(q: Tensor, keys: Tensor, values: Tensor, listed: Tensor, scale: float) -> Tensor:
    """[batch, heads, 1, d_v]; a head whose query sees nothing gets 0."""
    head = torch.arange(len(listed), device=q.device)[:, None]
    nothing = listed < 0
    scores = (keys[:, head, listed] @ q.transpose(2, 3)).squeeze(3) * scale  # Where there is no key, the last one's.
    weights = scores.masked_fill(nothing, -torch.inf).softmax(-1).masked_fill(nothing, 0)
    return weights[:, :, None] @ values[:, head, listed].to(weights.dtype)
