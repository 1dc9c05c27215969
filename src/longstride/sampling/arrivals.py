"""Arrivals: prompts of streams that join, read into their places alone or as the rows of one pass.

A pass over a short prompt takes a GPU's host longer than the GPU: it launches some twenty kernels for each block, whatever
their sizes. So prompts of similar lengths are padded on the right, and are rows of one pass. Attention is causal and
positions count from the start of a row, so that padding does not change what comes before it; rows do not see each other.
Products of other sizes may round differently, though.

Lengths and numbers of rows are rounded up, since plans of attention are made for each shape.
"""

from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.common.device import send
from longstride.model import SparseTransformer
from longstride.model.cache import Cache
from longstride.sampling.decoder import prefill_parts
from longstride.sampling.params import SamplingParams

SHORTEST, LONGEST = 64, 1024
"""The least length that prompts are padded to, and the greatest of those that are read together. Longer ones keep a GPU
busy alone."""
MOST_POSITIONS = 2**13
"""The most positions of a pass over several prompts: fewer than those of one long prompt."""


class Arrival(NamedTuple):
    """A stream that joins."""

    place: int
    prompt: bytes
    """Up to a context of bytes; may be empty."""
    state: int
    """From `random_state`, with the number of bytes before the prompt that a window has left behind added to it."""
    params: SamplingParams


def padded_length(n: int) -> int:
    """Returns the length that a prompt of n bytes is padded to in a pass with others: a power of two, or three quarters of
    one. n itself if it is read alone."""
    if not 0 < n <= LONGEST:
        return n
    power = max(SHORTEST, 1 << (n - 1).bit_length())
    return 3 * power // 4 if power > SHORTEST and n <= 3 * power // 4 else power


def most_together(n: int) -> int:
    """Returns the most prompts of `padded_length` n that are read together."""
    if n > LONGEST:
        return 1
    count = MOST_POSITIONS // max(n, SHORTEST)
    return 1 << (count.bit_length() - 1)


def read_prompts(
    model: SparseTransformer, cache: Cache, arrivals: Sequence[Arrival], pads: bool
) -> Generator[int, None, list[Tensor | None]]:  # fmt: skip
    """Reads prompts into the cache: yields the positions that were computed after each block, and returns the output of the
    last one for each prompt, [n, width]; None for prompts that are empty, which all are or none. For inference mode.

    pads: lengths are those of `padded_length`; otherwise there is one prompt, which is computed as it is.
    """
    prompts = [arrival.prompt for arrival in arrivals]
    lengths = [len(prompt) for prompt in prompts]
    n, rows = max(lengths), len(prompts)
    if not n:
        return [None] * rows
    assert all(lengths)
    if pads:
        n, rows = min(padded_length(n), model.config.context), 1 << (rows - 1).bit_length()
    # Padded with bytes of the prompt itself, which is then not finite only where the prompt is not.
    data = b"".join(prompt.ljust(n, prompt[-1:]) for prompt in prompts)
    data += data[-n:] * (rows - len(prompts))
    tokens = send(torch.frombuffer(bytearray(data), dtype=torch.uint8), cache.all_keys.device).view(rows, n)
    kept = cache.kept_slots([arrival.place for arrival in arrivals], lengths, n)
    outputs: Iterable[Tensor] = ()
    for outputs in prefill_parts(model, cache, tokens, partial(cache.store, kept=kept)):  # noqa: B007 (the last is used)
        yield rows * n
    return [row[:length] for row, length in zip(outputs, lengths)]
