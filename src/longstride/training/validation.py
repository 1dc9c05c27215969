"""Bits per byte of a fixed part of a split: the same bytes every time, each scored once."""

import numpy as np
import torch
from torch import Tensor

from longstride.data.loader import Places, Sequences
from longstride.model import SparseTransformer
from longstride.training.ranks import ALONE, Ranks


@torch.no_grad()
def validate(
    model: SparseTransformer, sequences: Sequences, starts: Places, batch: int, device: torch.device, ranks: Ranks = ALONE
) -> float:  # fmt: skip
    """Nats per byte. Each process has some of the sequences; sums are put in one order, added, and divided once."""
    model.eval()
    rounds = -(-len(starts) // ranks.count)
    # All do the same number of passes, as a spread model needs; what is one too many is left out of the sum.
    own = starts[np.minimum(np.arange(rounds) * ranks.count + ranks.rank, len(starts) - 1)]
    sums = []
    for first in range(0, rounds, batch):
        tokens = torch.from_numpy(sequences.at(own[first : first + batch])).to(device)
        sums.append(model.nats(tokens).double().sum(1))
    model.train()
    total = ranks.gather(torch.cat(sums)).T.flatten()[: len(starts)].sum()
    return float(total) / (len(starts) * sequences.context)


@torch.no_grad()
def reconstruct(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """At every place the byte that the model thinks most likely, given the true ones before it; uint8 like tokens."""
    model.eval()
    h = model.hidden(tokens)
    parts = [model.logits(part).argmax(-1) for part in torch.split(h, model.config.chunk, 1)]
    model.train()
    return torch.cat(parts, 1).to(torch.uint8)
