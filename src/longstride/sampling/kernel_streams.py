"""Base class of streams that Triton kernels extend: weights and head tables in the kernels' layout, and the cache."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from math import e, log2, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.cache import Cache
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.arguments import (
    BlockWeights,
    Embedding,
    Linear,
    NetworkSizes,
    Norm,
    VisibleSlots,
    Weights,
)
from longstride.sampling.kernels.cached_attention import HeadSizes, constants
from longstride.sampling.kernels.common import START
from longstride.sampling.kernels.slots import list_seen, table

LIST_BLOCK = 256
"""Keys of a leaf that one program of `list_seen` writes."""


class KernelStreams:
    """Sequences that grow together on one device, all at the same position unless `each` has its own."""

    each = False

    def __init__(
        self, model: SparseTransformer, batch: int, length: int, convert: Callable[[Tensor], Tensor], readers: int = 1,
        shared: "KernelStreams | None" = None,
    ) -> None:  # fmt: skip
        """convert: makes stacked weight matrices [layers, out, in] what the kernels multiply by. readers: programs that read
        the last byte, each from its own copy. shared: streams whose cache these use, too, the first of them or another
        (`HeadTables.select`)."""
        config = model.config
        assert not config.beyond_the_paper
        self.config, self.batch, self.length = config, batch, length
        self.device = next(model.parameters()).device
        self.model: SparseTransformer = in_float32(model) if shared is None else shared.model
        self.cache: Cache = make_cache(model, batch, length) if shared is None else shared.cache
        self.weights = stack_weights(self.model, convert)
        self.tables = HeadTables(self.cache, self.device)
        self.d_qk, self.d_v = config.qk_width // config.heads, config.width // config.heads
        self.head = constants(HeadSizes(self.d_qk, self.d_v, *head_blocks(config), scale=log2(e) / sqrt(self.d_qk)))
        self.network = constants(network_sizes(config, self.tables.cycle))
        self.position = 0
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.device)
        self.last_bytes = torch.full((readers, batch), START.value, dtype=torch.int32, device=self.device)

    def prefill(self, tokens: Tensor) -> None:
        """Computes keys and values of the first n positions, tokens [batch, n]; n may be 0."""
        n = tokens.shape[1]
        if n:
            prefill(self.model, self.cache, tokens)
            self.tokens[:, :n] = tokens
            self.last_bytes[:] = tokens[:, -1]
        self.position = n

    def visible_slots(self, positions: int) -> VisibleSlots:
        """Returns room for the visible slots of some positions."""
        rows, most = positions * len(self.tables.heads), self.tables.most

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.device)

        return VisibleSlots(zeros(1), slots=zeros(rows * most), counts=zeros(rows), own=zeros(rows), capacity=most)

    def list_seen(self, visible: VisibleSlots, positions: int) -> None:
        """Lists the visible slots of `positions` positions: from visible.position on, or with `each` those that it has."""
        tables = self.tables
        list_seen[(positions * len(tables.heads), -(-tables.most // LIST_BLOCK))](
            tables.table, visible.position, visible.slots, visible.counts, visible.own, visible.capacity,
            HEADS=len(tables.heads), LEAVES=tables.leaves, BLOCK_SIZE=LIST_BLOCK, EACH=self.each,
        )  # fmt: skip

    def device_context(self) -> AbstractContextManager[object]:
        """Context in which kernels are launched on the streams' device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def stack_weights(model: SparseTransformer, convert: Callable[[Tensor], Tensor]) -> Weights:
    """Returns a model's weights for the kernels: those of all blocks stacked, their matrices converted."""
    blocks: Any = model.blocks
    embedding: Any = model.embedding
    last_norm: Any = model.norm

    def stack(parameters: list[Tensor]) -> Tensor:
        return torch.stack([parameter.detach() for parameter in parameters])

    def linear(layers: list[Any]) -> Linear:
        return Linear(convert(stack([layer.weight for layer in layers])), stack([layer.bias for layer in layers]))

    def norm(layers: list[Any]) -> Norm:
        return Norm(stack([layer.weight for layer in layers]), stack([layer.bias for layer in layers]))

    tables = [embedding.position[name].weight.detach() for name in embedding.positions.names]
    return Weights(
        Embedding(
            tokens=torch.cat([embedding.token.weight.detach(), embedding.start.detach()[None]]),
            positions=torch.cat(tables),
            coordinates=_coordinates(embedding.positions.sizes).to(tables[0].device),
        ),
        BlockWeights(
            norm([block.norm_attention for block in blocks]),
            linear([block.attention.query_key_value for block in blocks]),
            linear([block.attention.project for block in blocks]),
            norm([block.norm_ff for block in blocks]),
            linear([block.ff.inner for block in blocks]),
            linear([block.ff.outer for block in blocks]),
        ),
        Norm(last_norm.weight.detach(), last_norm.bias.detach()),
        model.output.weight.detach(),
    )


def _coordinates(sizes: Sequence[int]) -> Tensor:
    """Returns `Embedding.coordinates` for position tables of these sizes; the last coordinate steps fastest."""
    rows, stride = [], prod(sizes)
    for first, size in zip(accumulate(sizes, initial=0), sizes):
        stride //= size
        rows.append([first, stride, size])
    return torch.tensor(rows, dtype=torch.int32)


class HeadTables:
    """The patterns of a cycle's heads as a table for kernels, and where each block's keys start in the cache."""

    def __init__(self, cache: Cache, device: torch.device) -> None:
        config = cache.config
        self.cycle = min(len(config.cycle), config.layers)
        self.heads = [head for heads in cache.heads[: self.cycle] for head in heads]
        self.leaves = max(len(head.pattern.leaves) for head in self.heads)
        self.most = max(head.most for head in self.heads)
        self.table = table(self.heads, self.leaves).to(device)
        starts = torch.tensor([0, *cache.slots[:-1]]).cumsum(0) * (cache.keys[0].shape[0] * config.heads)
        self.first_starts = self.starts = starts.to(device)
        self.slots = torch.tensor(cache.slots, dtype=torch.int32, device=device)
        self.stream_slots = self.slots.long() * config.heads

    def select(self, stream: int) -> None:
        """Makes this stream of the cache the first."""
        self.starts = self.first_starts + stream * self.stream_slots

    def most_between(self, first: int, last: int) -> int:
        """Returns the most keys that a query from position `first` to `last` sees."""
        return max(head.most_between(first, last) for head in self.heads)


def network_sizes(config: ModelConfig, cycle: int) -> NetworkSizes:
    return NetworkSizes(
        layers=config.layers, width=config.width, ff_width=config.ff_width, heads=config.heads,
        qkv_width=2 * config.qk_width + config.width, coordinates=len(config.positions.sizes), cycle=cycle,
        block_width=next_power_of_2(config.width), block_ff=next_power_of_2(config.ff_width),
    )  # fmt: skip


def head_blocks(config: ModelConfig) -> tuple[int, int]:
    """Returns the block sizes for a head's queries and keys (loaded in two halves, so at least 2) and for its values."""
    return max(2, next_power_of_2(config.qk_width // config.heads)), next_power_of_2(config.width // config.heads)


def previous_power_of_2(number: int) -> int:
    """Returns the largest power of two <= number; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two >= number."""
    return 1 << (number - 1).bit_length()
