"""Base class of streams that Triton kernels extend: weights and head tables in the kernels' layout, and the cache."""

from contextlib import AbstractContextManager, nullcontext
from math import e, log2, sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.cached import list_seen, table
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.cache import Cache
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.common import START

PRODUCTS = ("qkv_weight", "project_weight", "inner_weight", "outer_weight")
"""Weight matrices of a block."""
LIST_BLOCK = 256
"""Keys of a leaf that one program of `list_seen` writes."""


class KernelStreams:
    """Sequences that grow together, all at the same position, on one device."""

    def __init__(self, model: SparseTransformer, batch: int, length: int, dtype: torch.dtype, readers: int = 1) -> None:
        """dtype: of the weight matrices. readers: programs that read the last byte, each from its own copy."""
        config = model.config
        self.config, self.batch, self.length = config, batch, length
        self.device = next(model.parameters()).device
        self.model = in_float32(model)
        self.cache = make_cache(model, batch, length)
        self.weights = KernelWeights(self.model, dtype, self.device).tensors
        self.tables = HeadTables(self.cache, self.device)
        self.d_qk, self.d_v = config.qk_width // config.heads, config.width // config.heads
        self.block_qk, self.block_v = head_blocks(config)
        self.scale = log2(e) / sqrt(self.d_qk)
        self.position = 0
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.device)
        self.chosen = torch.full((readers, batch), START.value, dtype=torch.int32, device=self.device)

    def prefill(self, tokens: Tensor) -> None:
        """Computes keys and values of the first n positions, tokens [batch, n]; n may be 0."""
        n = tokens.shape[1]
        if n:
            prefill(self.model, self.cache, tokens)
            self.tokens[:, :n] = tokens
            self.chosen[:] = tokens[:, -1]
        self.position = n

    def list_seen(self, first: Tensor, positions: int, lists: dict[str, Tensor]) -> None:
        """Fills `lists` for `positions` positions from `first` on: visible slots (seen), their counts, and the own slot."""
        tables = self.tables
        list_seen[(positions * len(tables.heads), -(-tables.most // LIST_BLOCK))](
            tables.table, first, **lists, most=tables.most, HEADS=len(tables.heads), LEAVES=tables.leaves,
            BLOCK_SIZE=LIST_BLOCK,
        )  # fmt: skip

    def device_context(self) -> AbstractContextManager[object]:
        """Context in which kernels are launched on the streams' device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class KernelWeights:
    """A model's weights under the names of the kernels' arguments; those of all blocks are stacked, [layers, ...]."""

    def __init__(self, model: SparseTransformer, dtype: torch.dtype, device: torch.device) -> None:
        stacks: dict[str, list[Tensor]] = {}
        block: Any
        for block in model.blocks:
            attention, ff = block.attention, block.ff
            for name, x in {
                "norm_1": block.norm_attention.weight, "shift_1": block.norm_attention.bias,
                "qkv_weight": attention.query_key_value.weight, "qkv_bias": attention.query_key_value.bias,
                "project_weight": attention.project.weight, "project_bias": attention.project.bias,
                "norm_2": block.norm_ff.weight, "shift_2": block.norm_ff.bias,
                "inner_weight": ff.inner.weight, "inner_bias": ff.inner.bias,
                "outer_weight": ff.outer.weight, "outer_bias": ff.outer.bias,
            }.items():  # fmt: skip
                stacks.setdefault(name, []).append(x.detach())
        self.tensors = {name: torch.stack(parts) for name, parts in stacks.items()}
        for name in PRODUCTS:
            self.tensors[name] = self.tensors[name].to(dtype)  # Exact: `in_float32` has rounded them to this precision.
        embedding: Any = model.embedding
        tables = [embedding.position[name].weight.detach() for name in embedding.positions.names]
        self.tensors |= {
            "norm_last": model.norm.weight.detach(), "shift_last": model.norm.bias.detach(),
            "output_weight": model.output.weight.detach(),
            "token_table": torch.cat([embedding.token.weight.detach(), embedding.start.detach()[None]]),
            "place_table": torch.cat(tables),
        }  # fmt: skip
        places, first, stride = [], 0, 1
        for size in embedding.positions.sizes:
            places.append([first, 0, size])
            first += size
        for place in reversed(places):
            place[1] = stride
            stride *= place[2]
        self.tensors["places"] = torch.tensor(places, dtype=torch.int32, device=device)


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
        self.tensors = {
            "starts": starts.to(device),
            "slot_counts": torch.tensor(cache.slots, dtype=torch.int32, device=device),
        }

    def most_between(self, first: int, last: int) -> int:
        """Returns the most keys that a query from position `first` to `last` sees."""
        return max(head.most_between(first, last) for head in self.heads)


def head_blocks(config: ModelConfig) -> tuple[int, int]:
    """Returns the block sizes for a head's queries and keys (loaded in two halves, so at least 2) and for its values."""
    return max(2, next_power_of_2(config.qk_width // config.heads)), next_power_of_2(config.width // config.heads)


def previous_power_of_2(number: int) -> int:
    """Returns the largest power of two <= number; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two >= number."""
    return 1 << (number - 1).bit_length()
