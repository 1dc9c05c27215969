"""The oracle: masked softmax, as the paper writes it. Short, any dtype, differentiable as often as PyTorch allows.

Shapes: q, k [batch, heads, n, d_qk]; v [batch, heads, n, d_v]; the result [batch, heads, n, d_v].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longstride.patterns import Pattern


def attend_reference(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, with the whole n x n score matrix in memory."""
    hidden = ~torch.stack([pattern.mask(q.shape[-2], q.device) for pattern in heads])  # [heads, n, n]
    scores = (q @ k.transpose(-1, -2)) * scale  # [batch, heads, n, n]
    # A finite fill keeps a query that sees no key free of NaN; the second mask then takes its even weights to 0.
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(hidden, 0) @ v
