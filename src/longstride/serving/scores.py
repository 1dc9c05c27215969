"""What a model thinks of given bytes: the bits of each, the bytes that were likely in its place, and where each head looked.

A stream longer than the context is scored in windows that overlap by half of the context. A byte is looked at in the window
that scores it, so that its probability there agrees with its bits.
"""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longstride.evaluation.scoring import Window, windows_of
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.inspection import check_indices, evenly_spaced, inspect_attention

BYTES_PER_PASS = 2**13
"""Bytes of the windows that are computed at a time; at least one window."""
MOST_WEIGHTS = 2**22
"""The most attention weights of an answer, one byte each. A model with more gives those of some layers at a time."""
LARGEST = 255

Levels = npt.NDArray[np.uint8]


class Look(NamedTuple):
    """The prediction of one byte. Key 0 is the start of the window; key j > 0 has read byte first + j - 1."""

    first: int
    """The byte that the window begins with."""
    probabilities: npt.NDArray[np.float64]
    """[256]"""
    layers: list[int]
    """Those whose weights are here."""
    levels: Levels
    """[layers, heads, keys]: attention weights in parts of the head's largest, from 0 to LARGEST."""
    maxima: npt.NDArray[np.float64]
    """[layers, heads]: the largest weight of each head; 0 if it sees no key."""


def windows(config: ModelConfig, count: int) -> list[Window]:
    """Returns the windows that score this many bytes of a stream, or the one of an image."""
    return windows_of(count, config.context, config.context // 2)


def passes(config: ModelConfig, count: int) -> list[list[Window]]:
    """Splits the windows of this many bytes into those that are computed at a time."""
    every = windows(config, count)
    batch = max(1, BYTES_PER_PASS // (every[0].end - every[0].start))
    return [every[begin : begin + batch] for begin in range(0, len(every), batch)]


@torch.no_grad()
def score_pass(model: SparseTransformer, data: bytes, part: Sequence[Window]) -> npt.NDArray[np.float64]:
    """Returns -log2 p of every byte that these windows score. What is not finite is NaN."""
    rows = [np.frombuffer(data[window.start : window.end], np.uint8) for window in part]
    tokens = torch.from_numpy(np.stack(rows)).to(next(model.parameters()).device)
    nats = model.nats(tokens).double().cpu().numpy()
    bits = np.concatenate([row[window.first - window.start :] for row, window in zip(nats, part)]) / log(2)
    return np.where(np.isfinite(bits), bits, np.nan)


def look_at(model: SparseTransformer, data: bytes, position: int, layers: Sequence[int] | None = None) -> Look:
    """Returns the prediction of data[position] from the bytes before it. `layers`: those whose attention weights are
    wanted; by default all, or some that are evenly spaced if all have more than MOST_WEIGHTS."""
    window = next(one for one in windows(model.config, len(data)) if position < one.end)
    keys = position - window.start + 1
    room = max(1, MOST_WEIGHTS // (keys * model.config.heads))
    if layers is None:
        layers = evenly_spaced(model.config.layers, room)
    elif len(check_indices("layers", layers, model.config.layers)) > room:
        raise ValueError(f"look: {len(layers)} layers of {keys:,} weights per head are too many; give at most {room}")
    tokens = torch.frombuffer(bytearray(data[window.start : position + 1]), dtype=torch.uint8)
    inspection = inspect_attention(model, tokens.to(next(model.parameters()).device), keys - 1, layers)
    weights = np.nan_to_num(inspection.weights.float().cpu().numpy())
    maxima = weights.max(-1)
    shares = weights / np.where(maxima > 0, maxima, 1)[..., None]
    levels = np.round(LARGEST * shares).astype(np.uint8)
    return Look(window.start, inspection.probabilities.double().cpu().numpy(), list(layers), levels, maxima.astype(float))
