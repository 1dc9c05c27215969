"""Which implementation makes the bytes: plain PyTorch anywhere; on a GPU one kernel for few streams, graphs for many."""

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.sampling.choose import Choice
from longstride.sampling.decoder import Plain

HAS_TRITON = importlib.util.find_spec("triton") is not None
FEW = 8
"""The most streams that one kernel makes together: it multiplies by one vector after the other."""
PIECE = 128
"""Bytes that a GPU makes before they are looked at."""


class Streams(Protocol):
    """Sequences that grow together."""

    tokens: Tensor
    """uint8 [batch, length]"""
    returns_early: bool
    """Whether `make` returns long before a GPU has made the bytes."""

    @property
    def position(self) -> int:
        """Of the next byte."""

    @property
    def logits(self) -> Tensor:
        """[batch, 256], from which the last byte was chosen."""

    def prefill(self, tokens: Tensor) -> None:
        """Takes in the first bytes of all, [batch, n]; n may be 0."""

    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps]. Of a stream those below `known` [batch] are what `tokens` has."""


def choose(config: ModelConfig, batch: int, device: torch.device) -> tuple[str, str]:
    """The implementation's name, and why."""
    if device.type != "cuda":
        return "plain", "PyTorch, on a CPU"
    if not HAS_TRITON:
        return "plain", "PyTorch, since Triton is not installed"
    if batch > FEW:
        return "batched", f"a graph of products, for more than {FEW} streams"
    from longstride.sampling.resident import fits

    if not fits(config, batch, device):
        return "batched", "a graph of products, since a matrix is too large for one kernel"
    return "resident", "one kernel, for few streams"


def piece_size(device: torch.device) -> int:
    """Bytes to ask for at a time: on a CPU they are handed out one by one."""
    return PIECE if device.type == "cuda" else 1


def open_streams(model: SparseTransformer, batch: int, length: int, implementation: str | None = None) -> Streams:
    device = next(model.parameters()).device
    name = implementation or choose(model.config, batch, device)[0]
    if name == "plain":
        return Plain(model, batch, length)
    # Imported when they are used, since Triton is not everywhere.
    if name == "batched":
        from longstride.sampling.batched import Batched

        return Batched(model, batch, length)
    from longstride.sampling.resident import Resident

    return Resident(model, batch, length)
