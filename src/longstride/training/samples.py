"""Sample files of held-out data and of the model's predictions for it, to look at or listen to."""

from pathlib import Path

import torch

from longstride.data.loader import Sequences
from longstride.data.store import Store
from longstride.model import SparseTransformer
from longstride.training.validation import reconstruct


def write_samples(
    folder: Path | None, store: Store, model: SparseTransformer, sequences: Sequences, device: torch.device
) -> list[Path]:  # fmt: skip
    """Writes sample-data and sample-model to `folder` and returns the paths. sample-model has the most likely byte at every
    position, given the true bytes before it. With folder None it only computes them, as all processes must under FSDP."""
    starts = sequences.spread(store.data_kind.examples)
    true = sequences.at(starts)
    predicted = torch.cat([reconstruct(model, torch.from_numpy(row)[None].to(device)).cpu() for row in true]).numpy()
    if folder is None:
        return []
    samples = {"sample-data": true, "sample-model": predicted}
    return [store.data_kind.write_examples(data, folder, name) for name, data in samples.items()]
