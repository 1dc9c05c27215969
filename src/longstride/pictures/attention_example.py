"""The input of an attention picture: a model and one sequence of its data."""

from dataclasses import dataclass
from pathlib import Path

import torch

from longstride.common.console import StandardError, print_line
from longstride.common.files import real_path
from longstride.data.kind import DataKind
from longstride.data.loader import Sequences
from longstride.data.plan import Bytes
from longstride.model import SparseTransformer
from longstride.training.source import open_source, open_source_data

OWNER = "plot attention"


@dataclass(frozen=True)
class Example:
    name: str
    """Name of the run and its checkpoint, or of the model."""
    model: SparseTransformer
    data: str
    """Caption: which data the bytes come from."""
    kind: DataKind
    tokens: Bytes
    """One sequence of the context's length, uint8."""

    @property
    def item(self) -> tuple[int, ...]:
        """Height, width and channels of an image; empty for a stream."""
        return self.kind.item

    @property
    def columns(self) -> int:
        """Row length of the matrix that shows the positions: the stride, with which patterns are periodic."""
        sizes = self.model.config.positions.sizes or self.item
        if not sizes:  # Rotary positions have no matrix.
            return self.model.config.period
        return sizes[1] if len(sizes) == 2 else sizes[1] * sizes[2]

    @property
    def rows(self) -> int:
        return -(-len(self.tokens) // self.columns)

    @property
    def default_position(self) -> int:
        """A position two thirds down and in the middle across."""
        if self.item:
            height, width, channels = self.item
            return (height * 2 // 3 * width + width // 2) * channels
        return min(len(self.tokens) - 1, self.rows * 2 // 3 * self.columns + self.columns // 2)


def open_example(folder: Path, data: Path | None, split: str, item: int, device: torch.device) -> Example:
    """Opens a run or a saved model, and sequence number `item` of a split. data: None for the data of the run."""
    source = open_source(OWNER, folder)
    model = SparseTransformer.from_pretrained(source.weights, precision="float32", recompute="off").to(device)
    opened = open_source_data(OWNER, source, model.config, data)
    path, store = opened.path, opened.store
    if opened.remark:
        print_line(StandardError(), opened.remark)
    split_name = f"{path} ({split})"
    sequences = Sequences(store.split(split), model.config.context, store.item_bytes, split_name)
    count = len(sequences.data) // sequences.context
    if not 0 <= item < count:
        piece = "an image" if store.item else f"a window of {sequences.context:,} bytes"
        raise ValueError(f"{OWNER}: item must be 0 to {count - 1:,}, got {item:,}; it is {piece} of {split_name}")
    start = item * sequences.context
    tokens = sequences.data[start : start + sequences.context].copy()
    described = f"{path.name}, {split} {'image' if store.item else 'window'} {item:,}"
    name = real_path(source.folder).name + (f", {source.checkpoint}" if source.checkpoint else "")
    return Example(name, model, described, store.data_kind, tokens)
