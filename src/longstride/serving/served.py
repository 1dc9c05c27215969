"""Served: the model that a server answers with, loaded from a run, a saved model, or by the name of one that comes along."""

from dataclasses import dataclass
from pathlib import Path

import torch

from longstride.common.checks import printable
from longstride.common.device import choose_device
from longstride.data.kind import DataKind
from longstride.model import SparseTransformer
from longstride.model.card import Card
from longstride.sampling.data_kind import find_data_kind
from longstride.training.run import WEIGHTS
from longstride.training.source import open_source


@dataclass(frozen=True)
class Served:
    """A loaded model and what is known of it."""

    name: str
    """What clients call it. No path."""
    model: SparseTransformer
    """On its device, without dropout."""
    kind: DataKind
    """What its bytes are."""
    card: Card | None = None
    """The card of a saved model, if it has one."""
    run: Path | None = None
    """The folder of the run that it was loaded from; None for a saved model."""
    created: int = 0
    """Seconds since 1970 at which its weights were written."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def open_served(
    owner: str, folder: Path, *, name: str | None = None, checkpoint: str | None = None, kind: str | None = None,
    device: str = "auto",
) -> Served:  # fmt: skip
    """Loads a run's best weights, a checkpoint, a saved model, or a model that comes with longstride, by its name.

    owner: the command, which begins every error message. name: instead of the card's or the folder's own.
    """
    source = open_source(owner, folder, checkpoint)
    model = SparseTransformer.from_pretrained(source.weights)
    try:
        data = find_data_kind(source, model.config, kind)
    except ValueError as error:
        raise ValueError(f"{owner}: {str(error).removeprefix('sample: ')}") from None
    return Served(
        name or (source.card.name if source.card else "") or printable(source.folder.resolve().name) or "longstride",
        model.to(choose_device(owner, device)).eval().requires_grad_(False),
        data,
        source.card,
        source.folder if source.config is not None else None,
        int((source.weights / WEIGHTS).stat().st_mtime),
    )
