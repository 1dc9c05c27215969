"""Streams that are sampled together, and the choice of their implementation.

Plain PyTorch runs anywhere. On a GPU, one persistent kernel serves few streams, and a CUDA graph serves many.
"""

from typing import Protocol

import torch
from torch import Tensor

from longstride.attention.implementation import HAS_TRITON
from longstride.model import ModelConfig, SparseTransformer
from longstride.sampling.decoder import TorchStreams
from longstride.sampling.params import SamplingParams

MOST_RESIDENT = 8
"""The most streams of the persistent kernel, which multiplies matrices by one vector after the other."""
GPU_PIECE = 128
"""Bytes per stream that a GPU generates before they are copied to the CPU."""


class Streams(Protocol):
    """Sequences that grow together, one byte each per step."""

    tokens: Tensor
    """uint8 [batch, length]"""
    is_async: bool
    """Whether `extend` returns long before the GPU has finished."""

    @property
    def position(self) -> int:
        """Index of the next byte."""

    @property
    def logits(self) -> Tensor:
        """[batch, 256], of the last byte."""

    def prefill(self, tokens: Tensor) -> None:
        """Starts all streams with their first bytes, [batch, n]; n may be 0."""

    def extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> Tensor:
        """Appends `steps` bytes to each stream and returns them, [batch, steps], on the streams' device.

        Bytes before `prompt_lengths` [batch] are not sampled but taken from `tokens`. state: from `random_state`.
        """


def choose_implementation(config: ModelConfig, batch: int, device: torch.device) -> tuple[str, str]:
    """Returns the name of the implementation, and the reason."""
    if device.type != "cuda":
        return "pytorch", "on a CPU"
    if not HAS_TRITON:
        return "pytorch", "since Triton is not installed"
    if config.beyond_the_paper:
        return "pytorch", f"since the sampling kernels know the paper's network only, {_differences(config)}"
    if batch > MOST_RESIDENT:
        return "batched", f"a CUDA graph of products, for more than {MOST_RESIDENT} streams"
    from longstride.sampling.resident import fits

    if not fits(config, batch, device):
        return "batched", "a CUDA graph of products, since a matrix is too large for one kernel"
    return "resident", "one persistent kernel, for few streams"


def _differences(config: ModelConfig) -> str:
    names = config.beyond_the_paper
    return "and this one has " + ", ".join(f"{name} = {getattr(config, name)}" for name in names)


def piece_size(device: torch.device) -> int:
    """Returns the bytes per call of `extend`: on a CPU one, so that each is shown at once."""
    return GPU_PIECE if device.type == "cuda" else 1


def open_streams(model: SparseTransformer, batch: int, length: int, implementation: str | None = None) -> Streams:
    """Returns empty streams of up to `length` bytes, by the named implementation or the best one for the device."""
    device = next(model.parameters()).device
    name = implementation or choose_implementation(model.config, batch, device)[0]
    if name == "pytorch":
        return TorchStreams(model, batch, length)
    if model.config.beyond_the_paper:
        raise ValueError(
            f"sampling: the {name} kernels know the paper's network only, {_differences(model.config)}; "
            "use implementation = 'pytorch'"
        )
    # Imported late, since Triton may be missing.
    if name == "batched":
        from longstride.sampling.batched import BatchedStreams

        return BatchedStreams(model, batch, length)
    from longstride.sampling.resident import ResidentStreams

    return ResidentStreams(model, batch, length)
