"""The loss in nats per byte, for training and evaluation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def nats(h: Tensor, logits: Callable[[Tensor], Tensor], targets: Tensor, chunk: int) -> Tensor:
    """Returns -log p of every byte, float32 [batch, n], from H_N [batch, n, width].

    Calls `logits` for `chunk` positions at a time, and again in the backward pass, so that the logits of all positions are
    never in memory together.
    """
    parts = [
        checkpoint(_nats, h_chunk, logits, target_chunk, use_reentrant=False, preserve_rng_state=False)
        for h_chunk, target_chunk in zip(h.flatten(0, 1).split(chunk), targets.flatten().split(chunk))
    ]
    return torch.cat(parts).view(targets.shape)


def _nats(h: Tensor, logits: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(h), targets.long(), reduction="none")
