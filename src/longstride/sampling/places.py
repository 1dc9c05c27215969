"""Places: streams at positions of their own, which join and leave a batch between bytes.

A place holds one stream. What a stream gives depends on its own bytes, random state and parameters alone, and not on the
streams in other places.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longstride.common.device import memory_bytes
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import cache_bytes
from longstride.sampling.arrivals import Arrival
from longstride.sampling.marks import Mark
from longstride.sampling.params import SamplingParams
from longstride.sampling.streams import choose_implementation
from longstride.sampling.torch_places import TorchPlaces

MOST_PLACES = 64
"""Streams of a batch, unless a number is given."""
MEMORY_SHARE = 0.25
"""The most of a device's memory that their cache takes, unless a number is given."""
HOST_BYTES = 2**30
"""The most bytes that their cache takes in a computer's own memory, which others use, too."""
SCORED = 1024
"""Positions whose logits are computed at a time."""


class Turn(Protocol):
    """Bytes that were asked for; a GPU may still be computing them."""

    def data(self) -> list[bytes | None]:
        """The new bytes of each stream, in the order of the places given, None for one whose logits are not finite. Waits
        for them."""

    def logits(self) -> Tensor:
        """Of the last byte of each stream, [streams, 256], if they were asked for."""


class Places(Protocol):
    """A number of places for streams of one model."""

    count: int
    is_async: bool
    """Whether `extend` returns long before a GPU has finished."""
    runs_ahead: bool
    """Whether the device may do other work after the call that asks for it returns, such as that of `join`."""
    reads_together: bool
    """Whether `join` takes several streams at a time, whose prompts may then round differently than alone."""

    def mark(self) -> Mark:
        """Marks the end of the work so far."""

    def most_steps(self, streams: int) -> int:
        """The most bytes of a turn of so many streams."""

    def join(self, arrivals: Sequence[Arrival]) -> Generator[int, None, list[Tensor | None]]:
        """Starts streams, one if not `reads_together`; the prompts of all of them are empty, or none is. Yields the
        positions that were computed after each part of the work, so that other streams can go on. Returns the output of the
        last block for each prompt, [n, width], None if n is 0."""

    def copy(self, source: int, place: int, state: int, params: SamplingParams) -> None:
        """Starts a stream with the prompt of another one that has just joined, and was not extended yet."""

    def leave(self, place: int) -> None:
        """Frees a place."""

    def extend(self, places: Sequence[int], steps: int, keeps_logits: bool = False) -> Turn:
        """Appends bytes to the streams in these places, in ascending order; others wait. Inside the context only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, 256] for outputs of the last block, [n, width]."""


def open_places(model: SparseTransformer, count: int | None = None, exact: bool = False) -> Places:
    """Returns places for streams of a model, by the best implementation for its device.

    count: None for `place_count`. exact: streams do not change each other's bits on a GPU, either, where a stream that is
    alone is otherwise extended by another kernel, and prompts that wait at the same time are read together.
    """
    device = next(model.parameters()).device
    if count is None:
        count = place_count(model.config, device)
    if choose_implementation(model.config, count, device)[0] == "pytorch":
        return TorchPlaces(model, count, exact)
    # Imported late, since Triton may be missing.
    from longstride.sampling.kernel_places import KernelPlaces

    return KernelPlaces(model, count, exact)


def place_count(config: ModelConfig, device: torch.device) -> int:
    """Returns MOST_PLACES, or as many as their share of a device's memory is for; at least 1."""
    memory = memory_bytes(device)
    shares = [] if memory is None else [int(memory * MEMORY_SHARE)]
    if device.type == "cpu":
        shares.append(HOST_BYTES)
    return max(1, min(MOST_PLACES, *(share // cache_bytes(config) for share in shares)))
