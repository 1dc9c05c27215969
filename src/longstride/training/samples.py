"""Sample files of held-out data and of the model's predictions for it, to look at or listen to."""

from pathlib import Path

import torch

from longstride.common.atomic import atomic_path
from longstride.data.loader import Sequences
from longstride.data.store import Store
from longstride.model import SparseTransformer
from longstride.training.validation import reconstruct

IMAGES, ACROSS = 16, 4
SHOWN = 2000
"""The most bytes of a text sample."""


def write_samples(
    folder: Path | None, store: Store, model: SparseTransformer, sequences: Sequences, device: torch.device
) -> list[Path]:  # fmt: skip
    """Writes sample-data and sample-model to `folder` and returns the paths. sample-model has the most likely byte at every
    position, given the true bytes before it. With folder None it only computes them, as all processes must under FSDP."""
    starts = sequences.spread(IMAGES if store.kind == "images" else 1)
    true = sequences.at(starts)
    predicted = torch.cat([reconstruct(model, torch.from_numpy(row)[None].to(device)).cpu() for row in true]).numpy()
    written: list[Path] = []
    if folder is None:
        return written
    for name, data in (("sample-data", true), ("sample-model", predicted)):
        if store.kind == "images":
            from longstride.data.images import sheet

            path = folder / f"{name}.png"
            sheet(data, store.item, ACROSS, path)
        elif store.kind == "audio":
            from longstride.data.audio import RATE, to_wav

            path = folder / f"{name}.wav"
            to_wav(data.ravel(), path, store.rate or RATE)
        else:
            path = folder / f"{name}.txt"
            with atomic_path(path) as temporary:
                temporary.write_text(data.tobytes()[:SHOWN].decode("utf-8", "replace"), encoding="utf-8")
        written.append(path)
    return written
