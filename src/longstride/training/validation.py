"""Bits per byte of a fixed part of a split: the same bytes every time, each scored once."""

import torch
from torch import Tensor

from longstride.data.loader import Places, Sequences
from longstride.model import SparseTransformer


@torch.no_grad()
def validate(model: SparseTransformer, sequences: Sequences, starts: Places, batch: int, device: torch.device) -> float:
    """Nats per byte. They are summed, and divided once."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for first in range(0, len(starts), batch):
        tokens = torch.from_numpy(sequences.at(starts[first : first + batch])).to(device)
        total += model.nats(tokens).double().sum()
        count += tokens.numel()
    model.train()
    return float(total) / count


@torch.no_grad()
def reconstruct(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """At every place the byte that the model thinks most likely, given the true ones before it; uint8 like tokens."""
    model.eval()
    h = model.hidden(tokens)
    parts = [model.logits(part).argmax(-1) for part in torch.split(h, model.config.chunk, 1)]
    model.train()
    return torch.cat(parts, 1).to(torch.uint8)
