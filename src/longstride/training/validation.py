"""Validation on a fixed part of a split: the same bytes every time, each scored once."""

from math import fsum

import torch
from torch import Tensor

from longstride.data.loader import Places, Sequences
from longstride.evaluation.scoring import Window, score
from longstride.model import SparseTransformer
from longstride.training.ranks import SINGLE_RANK, Ranks


def validate(
    model: SparseTransformer, sequences: Sequences, starts: Places, batch: int, ranks: Ranks = SINGLE_RANK
) -> float:  # fmt: skip
    """Returns the nats per byte of the sequences, each scored without context."""
    windows = [Window(start, start + sequences.context, start) for start in starts.tolist()]
    return fsum(score(model, sequences.data, windows, batch, ranks)) / (len(windows) * sequences.context)


@torch.no_grad()
def reconstruct(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """Returns the most likely byte at every position, given the true bytes before it; uint8, shaped like tokens."""
    model.eval()
    h = model.hidden(tokens)
    parts = [model.logits(part).argmax(-1) for part in torch.split(h, model.config.chunk, 1)]
    model.train()
    return torch.cat(parts, 1).to(torch.uint8)
