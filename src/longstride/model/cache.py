"""The keys and values that a network still needs, while it makes one byte after the other.

cache = Cache(config, batch=4)
cache.bytes                               all it takes, from the beginning on
cache.fill(block, keys, values)           of a prompt: [batch, heads, n, d]
cache.add(block, at, key, value)          of one more byte: [batch, heads, 1, d], into a slot of each head
"""

import torch
from torch import Tensor

from longstride.attention.slots import Slots, slots
from longstride.model.config import ModelConfig


class Cache:
    """Each block has as many slots as that of its heads which needs most; `longstride.attention.slots` says which."""

    def __init__(
        self, config: ModelConfig, batch: int = 1, device: torch.device | str = "cpu",
        key_dtype: torch.dtype = torch.float32, value_dtype: torch.dtype = torch.float32, length: int | None = None,
    ) -> None:  # fmt: skip
        """`length`: how many positions there will be, if not the whole context."""
        self.config = config
        cycle = [block_slots(config, block, length) for block in range(min(config.layers, len(config.cycle)))]
        rooms = [max(head.count for head in heads) for heads in cycle]
        self.heads = [cycle[block % len(cycle)] for block in range(config.layers)]
        self.slots = [rooms[block % len(cycle)] for block in range(config.layers)]
        rows = [batch * config.heads * count for count in self.slots]
        d_qk, d_v = config.qk_width // config.heads, config.width // config.heads
        # Of all blocks together, so that a kernel can go from one to the next.
        self.all_keys = torch.zeros(sum(rows), d_qk, dtype=key_dtype, device=device)
        self.all_values = torch.zeros(sum(rows), d_v, dtype=value_dtype, device=device)
        self.keys = [x.view(batch, config.heads, -1, d_qk) for x in self.all_keys.split(rows)]
        self.values = [x.view(batch, config.heads, -1, d_v) for x in self.all_values.split(rows)]

    @property
    def bytes(self) -> int:
        return self.all_keys.nbytes + self.all_values.nbytes

    def fill(self, block: int, keys: Tensor, values: Tensor, rows: slice = slice(None)) -> None:
        """Keeps what will still be needed of the first n positions, for some of the sequences."""
        for number, head in enumerate(self.heads[block]):
            positions = head.kept(keys.shape[2])
            at, positions = head.of(positions).to(keys.device), positions.to(keys.device)
            for kept, given in ((self.keys, keys), (self.values, values)):
                kept[block][rows, number, at] = given[:, number, positions].to(kept[block].dtype)

    def add(self, block: int, at: Tensor, key: Tensor, value: Tensor) -> None:
        """`at`: the slot by head, below 0 for those that need not keep it."""
        head = torch.arange(len(at), device=at.device)
        kept = at >= 0
        if not kept.all():
            head, at, key, value = head[kept], at[kept], key[:, kept], value[:, kept]
        self.keys[block][:, head, at] = key[:, :, 0].to(self.keys[block].dtype)
        self.values[block][:, head, at] = value[:, :, 0].to(self.values[block].dtype)


def block_slots(config: ModelConfig, block: int, length: int | None = None) -> tuple[Slots, ...]:
    """By head, for `length` positions, or the whole context."""
    return tuple(slots(pattern, config.context if length is None else length) for pattern in config.patterns(block))


def cache_bytes(config: ModelConfig, key_bytes: int = 4, value_bytes: int = 4, length: int | None = None) -> int:
    """What a cache of one sequence takes."""
    each = config.qk_width * key_bytes + config.width * value_bytes
    n = config.context if length is None else length
    counts = [
        blocks * max(slots(pattern, n).count for pattern in set(heads)) for heads, blocks in config.block_counts.items()
    ]
    return sum(counts) * each
