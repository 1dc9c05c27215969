"""Decoding in plain PyTorch with a key and value cache, one position at a time.

    decoder = Decoder(model, batch=2)
    decoder.prefill(prompt)              prompt [batch, n], in one pass
    logits = decoder.step(last)          logits [batch, 256] of the next byte, given the last one [batch]; None at position 0

Activations are float32 whatever the model's precision, and weights are rounded to that precision: samples then hardly
depend on the implementation. The paper keeps queries and keys in float32, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.cache import Cache
from longstride.model.decode import View, decode, views
from longstride.model.layers import FEW, Linear, check_plain
from longstride.sampling.params import SamplingParams
from longstride.sampling.position import NetworkPosition, Products
from longstride.sampling.sampler import pick_bytes, probabilities, uniform

AHEAD = 64
"""The most positions whose visible slots are listed at a time."""
LISTED = 2**27
"""The most bytes of these lists; fewer positions are listed where queries see many keys."""
SINGLE_THREAD_PRODUCTS = 2**20
"""Below this many multiplications in a feed-forward layer, one CPU thread is faster than several."""
FEW_FOR_ONE_THREAD = 4
"""The least number of rows at which products of one CPU thread round independently of that number. For several: `FEW`."""
PREFILL_POSITIONS = 2**17
"""Positions per prefill pass, over all streams."""


class Decoder:
    """A model with its cache, at one position of all streams. Runs on any device."""

    def __init__(self, model: SparseTransformer, batch: int = 1, length: int | None = None) -> None:
        """`length`: positions that will be decoded; None for the whole context."""
        self.model = in_float32(model)
        self.batch = batch
        self.length = model.config.context if length is None else length
        self.device = next(model.parameters()).device
        self.cache = make_cache(model, batch, self.length)
        self.scale = 1 / sqrt(model.config.qk_width // model.config.heads)
        products = Products(self.model)
        self.network = NetworkPosition(self.model, batch, max(batch, self._least_rows(products)), products)
        self.position = 0
        self._earlier: Tensor | None = None
        """The bytes before the next step's input that the embedding reads, too: [batch, m], m <= last_bytes - 1."""
        self._views: list[list[View]] = []
        """For each entry of the cycle of blocks, its views at the positions `network.ahead`."""

    def _least_rows(self, products: Products) -> int:
        """Rows of a product, such that a stream does not depend on their number. The caller sets `thread_count` threads."""
        if self.device.type != "cpu":
            return 1
        if products.least_rows is not None:
            return products.least_rows
        return FEW_FOR_ONE_THREAD if thread_count(self.model.config, self.batch, self.device) == 1 else FEW

    def prefill(self, tokens: Tensor) -> None:
        """Computes keys and values of the first n positions, tokens [batch, n]. The last token is the next step's input."""
        assert self.position == 0
        if tokens.shape[1]:
            prefill(self.model, self.cache, tokens)
        self.position = tokens.shape[1]
        self._remember(tokens[:, :-1])

    def _remember(self, tokens: Tensor) -> None:
        """Keeps the last of these bytes for the next step's embedding."""
        count = self.model.config.last_bytes - 1
        self._earlier = tokens[:, -count:] if count else None

    @torch.inference_mode()
    def step(self, tokens: Tensor | None) -> Tensor:
        """Returns the float32 logits of the byte at `position`, and advances by one."""
        assert self.position < self.length
        assert (tokens is None) == (self.position == 0)
        if tokens is not None:
            tokens = tokens[:, None] if self._earlier is None else torch.cat([self._earlier, tokens[:, None]], 1)
            self._remember(tokens)
        if self.position not in self.network.ahead:
            self._look_ahead()
        here, cycle = self.position - self.network.ahead.start, len(self._views)
        attends = [
            partial(self._attend, layer, self._views[layer % cycle][here]) for layer in range(len(self.network.blocks))
        ]
        logits = self.network.step(tokens, self.position, attends)
        self.position += 1
        return logits

    @torch.inference_mode()
    def reorder(self, rows: Tensor) -> None:
        """Stream i goes on from what stream rows[i] has so far; rows [batch]."""
        for cached in (*self.cache.keys, *self.cache.values):
            cached.copy_(cached[rows])
        if self._earlier is not None:
            self._earlier = self._earlier[rows]

    @torch.inference_mode()
    def copy(self) -> "Decoder":
        """Returns a decoder that goes on by itself from the same position, with the same weights."""
        made = Decoder(self.model, self.batch, self.length)
        made.cache, made.position, made._earlier = deepcopy(self.cache), self.position, self._earlier
        return made

    def _look_ahead(self) -> None:
        """Makes the tables for the next positions."""
        entries = range(min(len(self.model.config.cycle), len(self.model.blocks)))
        each = sum((8 + 4 * self.batch) * head.most for entry in entries for head in self.cache.heads[entry])
        ahead = range(self.position, min(self.position + max(1, min(AHEAD, LISTED // max(1, each))), self.length))
        self.network.look_ahead(ahead)
        self._views = [
            views(self.cache.heads[entry], self.cache.slots[entry], ahead, self.batch, self.device) for entry in entries
        ]

    def _attend(self, layer: int, view: View, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.cache.add(layer, view, k, v)
        decode(q, *self.cache.rows[layer], view, self.scale, out)


@torch.inference_mode()
def prefill(model: SparseTransformer, cache: Cache, tokens: Tensor) -> None:
    """Fills the cache with the keys and values of the first n positions; tokens [batch, n]."""
    batch, n = tokens.shape
    rows = max(1, PREFILL_POSITIONS // n)
    for first in range(0, batch, rows):
        streams = slice(first, first + rows)
        for _ in prefill_parts(model, cache, tokens[streams], partial(cache.fill, rows=streams)):
            pass


def prefill_parts(model: SparseTransformer, cache: Cache, tokens: Tensor, store: Callable[..., None]) -> Iterator[Tensor]:
    """As `prefill`, one block at a time: yields the output of each. For inference mode.

    store: puts the keys and values of a block, [batch, heads, n, d], into the cache: store(block, keys, values).
    """
    position = torch.arange(tokens.shape[1], device=tokens.device)
    h, rotation = model.embedding(tokens), model.embedding.rotation(position)
    for layer, block in enumerate(model.blocks):
        h = block(h, partial(_attend_and_cache, block, cache, layer, store), rotation=rotation)
        yield h


def _attend_and_cache(
    block: Any, cache: Cache, layer: int, store: Callable[..., None], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:  # fmt: skip
    store(layer, k, v)
    # Values are rounded as in the cache: samples must not depend on the length of the prefill.
    attended: Tensor = block.attention.attend(q, k, v.to(cache.values[layer].dtype).to(v.dtype))
    return attended


class TorchStreams:
    """`Streams` in plain PyTorch, with a `Decoder`."""

    is_async = False

    def __init__(self, model: SparseTransformer, batch: int, length: int) -> None:
        self.decoder = Decoder(model, batch, length)
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.decoder.device)
        self.threads = thread_count(model.config, batch, self.decoder.device)
        self._state: Tensor | None = None
        self._drawn = range(0)
        self._numbers: Sequence[Tensor] = ()

    @property
    def position(self) -> int:
        return self.decoder.position

    def prefill(self, tokens: Tensor) -> None:
        self.tokens[:, : tokens.shape[1]] = tokens
        self.decoder.prefill(tokens)

    def extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> Tensor:
        first = self.position
        with cpu_threads(self.threads):
            self._extend(first, steps, prompt_lengths, state, params)
        return self.tokens[:, first : first + steps]

    def _extend(self, first: int, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> None:
        for here in range(first, first + steps):
            self.logits = self.decoder.step(self.tokens[:, here - 1] if here else None)
            chosen = pick_bytes(probabilities(self.logits, params), self._uniform(state, here))
            self.tokens[:, here] = torch.where(here < prompt_lengths, self.tokens[:, here], chosen)

    def _uniform(self, state: Tensor, position: int) -> Tensor:
        """The random numbers of a position, drawn for some positions at a time."""
        if state is not self._state or position not in self._drawn:
            self._state, self._drawn = state, range(position, position + AHEAD)
            positions = torch.arange(position, position + AHEAD, device=state.device)
            self._numbers = uniform(state[:, None], positions).unbind(1)
        return self._numbers[position - self._drawn.start]


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Context with this many CPU threads; None: as many as there are. In a step of a small model several would mostly wait
    for each other."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_count(config: ModelConfig, batch: int, device: torch.device) -> int:
    """Returns the CPU threads of a step."""
    little = config.width * config.ff_width * batch < SINGLE_THREAD_PRODUCTS
    return 1 if little and device.type == "cpu" else torch.get_num_threads()


def make_cache(model: SparseTransformer, batch: int, length: int) -> Cache:
    """Returns an empty cache with keys in float32 and values in the model's precision."""
    device, precision = next(model.parameters()).device, model.config.dtype
    return Cache(model.config, batch, device, torch.float32, precision if precision.itemsize < 4 else torch.float32, length)


def in_float32(model: SparseTransformer) -> SparseTransformer:
    """Returns a copy with float32 activations, no dropout, and block weights rounded to the model's precision."""
    check_plain("sample", model, "merge what they add into the layers' weights")
    config = replace(model.config, precision="float32", dropout=0.0, recompute="off")
    weights = dict(model.state_dict())
    dtype = model.config.dtype
    if dtype.itemsize < torch.float32.itemsize:
        for name, module in model.blocks.named_modules():
            if isinstance(module, Linear):
                for part, _ in module.named_parameters(recurse=False):
                    weights[f"blocks.{name}.{part}"] = weights[f"blocks.{name}.{part}"].to(dtype)
    with torch.device("meta"):
        twin = SparseTransformer(config)
    twin.load_state_dict({name: x.float() for name, x in weights.items()}, assign=True)
    return twin.eval()
