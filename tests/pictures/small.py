"""Models that are saved, and data for them, of every kind."""

import torch

from longstride.data import samples
from longstride.data.store import write_store
from tests.model.small import model

IMAGES = {"context": 75, "embedding": "image(5, 5, 3)", "pattern": "interleave(strided(15))"}
STREAM = {"context": 96, "embedding": "matrix(8)", "pattern": "heads(local(8), summary(8, 2))"}


def saved(folder, kind, **changes):
    """A model and a store of that kind, beside each other."""
    made = model(**{"layers": 3, "heads": 2, **(IMAGES if kind == "images" else STREAM), **changes})
    for block in made.blocks:
        torch.nn.init.normal_(block.attention.query_key_value.weight)
    made.save_pretrained(folder / "model")
    return folder / "model", store(folder / "data", kind)


def store(folder, kind):
    data = {"images": samples.patches()[:8, :5, :5].ravel(), "audio": samples.piano(), "text": samples.text()}
    whole = data.get(kind, samples.text())[:600]
    more = {"images": {"item": (5, 5, 3)}, "audio": {"rate": 12_000}}.get(kind, {})
    write_store(folder, kind, {"train": whole[:300], "valid": whole[300:]}, **more)
    return folder
