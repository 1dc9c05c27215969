"""Validation on held-out data: bits per byte of a fixed part of the split, and sample files with the model's predictions."""

from math import fsum
from pathlib import Path

import torch
from torch import Tensor

from longstride.data.loader import Places, Sequences
from longstride.data.store import Store
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
def predict_bytes(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """Returns the most likely byte at every position, given the true bytes before it; uint8, shaped like tokens."""
    model.eval()
    h = model.hidden(tokens)
    parts = [model.logits(part).argmax(-1) for part in torch.split(h, model.config.chunk, 1)]
    model.train()
    return torch.cat(parts, 1).to(torch.uint8)


def write_samples(
    folder: Path | None, store: Store, model: SparseTransformer, sequences: Sequences, device: torch.device
) -> list[Path]:  # fmt: skip
    """Writes sample-data and sample-model to `folder` and returns the paths. sample-model has the most likely byte at every
    position, given the true bytes before it. With folder None it only computes them, as all processes must under FSDP."""
    starts = sequences.spread(store.data_kind.examples)
    true = sequences.at(starts)
    predicted = torch.cat([predict_bytes(model, torch.from_numpy(row)[None].to(device)).cpu() for row in true]).numpy()
    if folder is None:
        return []
    samples = {"sample-data": true, "sample-model": predicted}
    return [store.data_kind.write_examples(data, folder, name) for name, data in samples.items()]
