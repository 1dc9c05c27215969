"""The oracle: masked softmax, as the paper writes it. Short, any dtype, differentiable as often as PyTorch allows.

Shapes: q, k [batch, heads, n, d_qk]; v [batch, heads, n, d_v]; the result [batch, heads, n, d_v].
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from longstride.patterns import Pattern


def attend_reference(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, with the whole n x n score matrix in memory.

    Inputs with NaN or infinity are computed query by query over the visible keys, since 0 * NaN in a product with all keys
    would reach other queries. Under torch.compile and torch.func values cannot be inspected, so there it does.
    """
    masks = torch.stack([pattern.mask(q.shape[-2], q.device) for pattern in heads])  # [heads, n, n]
    if not _has_values(q) or all(x.isfinite().all() for x in (q, k, v)):
        return _attend(q, k, v, ~masks, scale)
    by_head = []
    for head, mask in enumerate(masks):
        rows = []
        for query, seen in enumerate(mask):
            keys = seen.nonzero().squeeze(1)
            rows.append(_attend(q[:, head, [query]], k[:, head, keys], v[:, head, keys], ~seen[keys], scale))
        by_head.append(torch.cat(rows, 1))
    return torch.stack(by_head, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """hidden: pairs outside the pattern, bool [..., queries, keys]."""
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)  # [..., queries, keys]
    # Rows without a key, or with scores of -inf only, would give NaN in softmax: fill them with 0, then zero their weights.
    empty_rows = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty_rows, 0).softmax(dim=-1).masked_fill(hidden | empty_rows, 0) @ v


def _has_values(x: Tensor) -> bool:
    """Whether a tensor's values can be inspected: not under torch.compile or torch.func, and not on the meta device."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return type(x) in (Tensor, Parameter) and not traced and x.device.type != "meta"
