"""A network that is given one byte at a time, and keeps what it still needs of those before.

    decoder = Decoder(model, batch=2)
    decoder.prefill(prompt)              [batch, n], all at once
    logits = decoder.step(last)          [batch, 256] of the next byte, after the last one [batch]; None before the first

Whatever the model's precision, activations are float32 here, and weights are as that precision rounds them: so samples
hardly depend on which of our implementations makes them. The paper has queries and keys in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longstride.attention.decode import decode
from longstride.attention.slots import NO_SLOT
from longstride.model import SparseTransformer
from longstride.model.cache import Cache
from longstride.model.layers import Linear
from longstride.sampling.choose import Choice, pick, probabilities, uniform

AHEAD = 64
"""The most positions for which is found out at a time what their queries see."""
LISTED = 2**27
"""Bytes for that: fewer positions where they see much."""
LITTLE = 2**20
"""Products in a step of the feed-forward network's layer, below which more threads take longer."""
PREFILL = 2**17
"""Positions that are computed at a time."""


class Decoder:
    """In plain PyTorch, on any device."""

    def __init__(self, model: SparseTransformer, batch: int = 1, length: int | None = None) -> None:
        """`length`: how many positions there will be, if not the whole context."""
        self.model = in_float32(model)
        self.batch = batch
        self.length = model.config.context if length is None else length
        self.device = next(model.parameters()).device
        self.cache = make_cache(model, batch, self.length)
        self.scale = 1 / sqrt(model.config.qk_width // model.config.heads)
        self.position = 0
        self._ahead = range(0)
        self._lists: list[tuple[Tensor, Tensor]] = []

    def prefill(self, tokens: Tensor) -> None:
        """Takes in the first n bytes but the last one, which `step` is to be given; n may be 0."""
        assert self.position == 0
        if tokens.shape[1]:
            prefill(self.model, self.cache, tokens)
        self.position = tokens.shape[1]

    @torch.inference_mode()
    def step(self, tokens: Tensor | None) -> Tensor:
        """float32 logits of the byte at `position`, which then is one further."""
        assert self.position < self.length
        assert (tokens is None) == (self.position == 0)
        position = torch.tensor([self.position], device=self.device)
        h = self.model.embedding.after(tokens, self.batch, position)
        if self.position not in self._ahead:
            entries = range(min(len(self.model.config.cycle), len(self.model.blocks)))
            each = sum(8 * head.most for entry in entries for head in self.cache.heads[entry])
            self._ahead = range(self.position, min(self.position + max(1, min(AHEAD, LISTED // each)), self.length))
            self._lists = [self._list(entry) for entry in entries]
        here = self.position - self._ahead.start
        for number, block in enumerate(self.model.blocks):
            own, listed = self._lists[number % len(self._lists)]
            h = h + block(h, partial(self._attend, number, own[here], listed[here]))
        self.position += 1
        return self.model.logits(h)[:, 0]

    def _list(self, entry: int) -> tuple[Tensor, Tensor]:
        """For the positions ahead, where the heads of a block put their keys [positions, heads], and what they see."""
        heads = self.cache.heads[entry]
        positions = torch.arange(self._ahead.start, self._ahead.stop)
        own = torch.stack([head.of(positions) for head in heads], 1)
        lists = [head.listed(positions) for head in heads]
        most = max(listed.shape[1] for listed in lists)
        filled = [pad(listed, (0, most - listed.shape[1]), value=NO_SLOT) for listed in lists]
        return own.to(self.device), torch.stack(filled, 1).to(self.device)

    def _attend(self, number: int, own: Tensor, listed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.add(number, own, k, v)
        return decode(q, self.cache.keys[number], self.cache.values[number], listed, self.scale)


@torch.inference_mode()
def prefill(model: SparseTransformer, cache: Cache, tokens: Tensor) -> None:
    """Puts the keys and values of the first n positions into the cache; tokens [batch, n]."""
    batch, n = tokens.shape
    rows = max(1, PREFILL // n)
    for first in range(0, batch, rows):
        some = slice(first, first + rows)
        h = model.embedding(tokens[some])
        for number, block in enumerate(model.blocks):
            h = h + block(h, partial(_attend_and_keep, block, cache, number, some))


def _attend_and_keep(block: Any, cache: Cache, number: int, rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache.fill(number, k, v, rows)
    # Values as the cache rounds them: later bytes must not depend on how much was taken in at once.
    found: Tensor = block.attention.attend(q, k, v.to(cache.values[number].dtype).to(v.dtype))
    return found


class Plain:
    """Streams from the beginning on, all at the same position, by a `Decoder`."""

    returns_early = False

    def __init__(self, model: SparseTransformer, batch: int, length: int) -> None:
        self.decoder = Decoder(model, batch, length)
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.decoder.device)

    @property
    def position(self) -> int:
        return self.decoder.position

    def prefill(self, tokens: Tensor) -> None:
        self.tokens[:, : tokens.shape[1]] = tokens
        self.decoder.prefill(tokens)

    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps]. Of a stream those below `known` [batch] are what `tokens` has."""
        first = self.position
        with self._threads():
            self._make(first, steps, known, state, choice)
        return self.tokens[:, first : first + steps]

    def _make(self, first: int, steps: int, known: Tensor, state: Tensor, choice: Choice) -> None:
        for here in range(first, first + steps):
            self.logits = self.decoder.step(self.tokens[:, here - 1] if here else None)
            chosen = pick(probabilities(self.logits, choice), uniform(state, here))
            self.tokens[:, here] = torch.where(here < known, self.tokens[:, here], chosen)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Threads of a CPU that share little work mostly wait for each other."""
        before, config = torch.get_num_threads(), self.decoder.model.config
        little = config.width * config.ff_width * len(self.tokens) < LITTLE
        torch.set_num_threads(1 if little and self.tokens.device.type == "cpu" else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def make_cache(model: SparseTransformer, batch: int, length: int) -> Cache:
    """Keys in float32, values as the model's precision rounds them."""
    device, precision = next(model.parameters()).device, getattr(torch, model.config.precision)
    return Cache(model.config, batch, device, torch.float32, precision if precision.itemsize < 4 else torch.float32, length)


def in_float32(model: SparseTransformer) -> SparseTransformer:
    """The same network with float32 activations and without dropout, for what a half precision makes of its weights."""
    config = replace(model.config, precision="float32", dropout=0.0, recompute="off")
    weights = dict(model.state_dict())
    if model.config.precision not in ("float32", "float64"):
        dtype = getattr(torch, model.config.precision)
        for name, module in model.blocks.named_modules():
            if isinstance(module, Linear):
                for part in ("weight", "bias"):
                    weights[f"blocks.{name}.{part}"] = weights[f"blocks.{name}.{part}"].to(dtype)
    with torch.device("meta"):
        twin = SparseTransformer(config)
    twin.load_state_dict({name: x.float() for name, x in weights.items()}, assign=True)
    return twin.eval()
