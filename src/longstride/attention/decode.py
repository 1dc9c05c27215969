"""One new query against its visible cached keys, in plain PyTorch.

Shapes: q [batch, heads, 1, d_qk]; keys [batch, heads, slots, d_qk]; values [batch, heads, slots, d_v]; seen [heads, most],
the slots that each head's query sees, those of heads that see fewer filled up with `filled`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention.slots import Slots


class Seen(NamedTuple):
    slots: Tensor
    """[heads, most]"""
    filled: Tensor | None
    """[heads, most], true where there is no key; None if all see as many."""


def seen(heads: Sequence[Slots], query: int, device: torch.device) -> Seen:
    """What the query at that position sees, by head."""
    found = [head.seen(query) for head in heads]
    most = max(map(len, found))
    if all(len(one) == most for one in found):
        return Seen(torch.stack(found).to(device), None)
    table = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    filled = torch.arange(most) >= torch.tensor([[len(one)] for one in found])
    return Seen(table.to(device), filled.to(device))


def decode(q: Tensor, keys: Tensor, values: Tensor, seen: Seen, scale: float) -> Tensor:
    """[batch, heads, 1, d_v]; a head whose query sees nothing gets 0."""
    head = torch.arange(len(seen.slots), device=q.device)[:, None]
    scores = (keys[:, head, seen.slots] @ q.transpose(2, 3)).squeeze(3) * scale
    if seen.filled is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(seen.filled, -torch.inf).softmax(-1).masked_fill(seen.filled, 0)
    return weights[:, :, None] @ values[:, head, seen.slots].to(weights.dtype)
