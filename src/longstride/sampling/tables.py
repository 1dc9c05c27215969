"""A model's weights and where its heads have their keys, as kernels take them."""

from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.cached import table
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.cache import Cache

PRODUCTS = ("qkv_weight", "project_weight", "inner_weight", "outer_weight")


class Weights:
    """A model's, by the kernel's names: those of all blocks in one tensor each."""

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
            self.tensors[name] = self.tensors[name].to(dtype)  # They are so rounded already.
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


class Tables:
    """What kernels need to know of a cycle's heads, and where blocks have their keys."""

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
        """Keys that a query from position `first` to `last` may see."""
        return max(head.most_between(first, last) for head in self.heads)


def head_blocks(config: ModelConfig) -> tuple[int, int]:
    """Of a head's queries and keys, which are loaded in two halves, and of its values: the powers of two that hold them."""
    return max(2, power_above(config.qk_width // config.heads)), power_above(config.width // config.heads)


def power_below(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1) if number else 0


def power_above(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
