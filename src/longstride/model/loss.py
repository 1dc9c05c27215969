"""Nats per byte: one definition, for training and evaluation."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def nats(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """-log p of every byte, float32 [batch, n], from norm(H_N) [batch, n, width] and W_out [256, width].

    Logits are there for `chunk` positions at a time, and computed again in the backward pass.
    """
    parts = [
        checkpoint(_nats, some, weight, those, use_reentrant=False, preserve_rng_state=False)
        for some, those in zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk))
    ]
    return torch.cat(parts).view(targets.shape)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """norm(H_N) W_out, float32."""
    return F.linear(hidden, weight.to(hidden.dtype)).float()


def _nats(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(hidden, weight), targets.long(), reduction="none")
