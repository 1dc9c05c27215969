"""Key and value cache for sampling. It keeps only positions that later queries will see.

cache = Cache(config, batch=4)
cache.bytes                               its size, fixed from the start
cache.fill(block, keys, values)           stores a prompt: [batch, heads, n, d]
cache.store(block, keys, values, kept)    stores prompts of lengths of their own, for which `kept_slots` says what is kept
cache.copy(source, target, n)             copies a prompt of n bytes from one sequence of the batch to another
cache.add(block, view, key, value)        stores one more byte: [batch, heads, d], into the slots of a `View`
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from longstride.common.device import send
from longstride.model.config import ModelConfig
from longstride.model.decode import View
from longstride.model.slots import Slots, slots

TABLE_POSITIONS = 2**17
"""The most positions of all tables that are kept, each of which takes 16 bytes a head: long prompts have lengths of their
own, and their tables are large."""


class Cache:
    """Cache of all blocks. A block has as many slots per head as its largest head needs; see `model.slots`."""

    def __init__(
        self, config: ModelConfig, batch: int = 1, device: torch.device | str = "cpu",
        key_dtype: torch.dtype = torch.float32, value_dtype: torch.dtype = torch.float32, length: int | None = None,
    ) -> None:  # fmt: skip
        """`length`: the number of positions to make room for; the context if None."""
        self.config = config
        cycle = [block_slots(config, block, length) for block in range(min(config.layers, len(config.cycle)))]
        self.cycle = len(cycle)
        slot_counts = [max(head.count for head in heads) for heads in cycle]
        self.heads = [cycle[block % len(cycle)] for block in range(config.layers)]
        self.slots = [slot_counts[block % len(cycle)] for block in range(config.layers)]
        rows = [batch * config.heads * count for count in self.slots]
        d_qk, d_v = config.qk_width // config.heads, config.width // config.heads
        # One allocation for all blocks, so that a kernel can step from block to block.
        self.all_keys = torch.zeros(sum(rows), d_qk, dtype=key_dtype, device=device)
        self.all_values = torch.zeros(sum(rows), d_v, dtype=value_dtype, device=device)
        self.keys = [x.view(batch, config.heads, -1, d_qk) for x in self.all_keys.split(rows)]
        self.values = [x.view(batch, config.heads, -1, d_v) for x in self.all_values.split(rows)]
        self.rows = [(keys.flatten(1, 2), values.flatten(1, 2)) for keys, values in zip(self.keys, self.values)]
        """Keys and values of each block, [batch, heads * slots, d]."""
        self._indices: dict[int, tuple[int, Tensor, Tensor]] = {}
        self._tables: OrderedDict[int, list[tuple[Tensor, Tensor]]] = OrderedDict()

    @property
    def bytes(self) -> int:
        return self.all_keys.nbytes + self.all_values.nbytes

    def fill(self, block: int, keys: Tensor, values: Tensor, rows: slice = slice(None)) -> None:
        """Stores those of the first n positions that later queries see. `rows`: the sequences of the batch to fill."""
        source, slot = self._kept(block % self.cycle, keys.shape[2])
        for cached, new in zip(self.rows[block], (keys, values)):
            kept = new.flatten(1, 2).index_select(1, source)
            cached[rows].index_copy_(1, slot, kept.to(cached.dtype))

    def kept_slots(self, sequences: Sequence[int], lengths: Sequence[int], n: int) -> list[Tensor]:
        """For prompts that are padded to n positions, [prompts, heads, n, d], and go to these sequences of the batch: what
        `store` keeps in the blocks of each entry of the cycle, [2, count]. Indices into prompts * heads * n, and into the
        slots of all sequences."""
        positions, ends = torch.arange(n), torch.tensor(lengths)[:, None, None]
        result = []
        for (places, lifetimes), count in zip(self._tables_of(n), self.slots):
            keeps = (positions < ends) & (positions >= ends - lifetimes)  # [prompts, heads, n]
            source = keeps.flatten().nonzero()[:, 0]
            first = torch.tensor(sequences) * (self.config.heads * count)
            slot = places[source % len(places)] + first[source // len(places)]
            result.append(send(torch.stack([source, slot]), self.all_keys.device))
        return result

    def _tables_of(self, n: int) -> list[tuple[Tensor, Tensor]]:
        """Returns for the blocks of each entry of the cycle: slots of the first n positions, [heads * n], among those of a
        sequence, and their lifetimes, [heads, n]."""
        if n not in self._tables:
            positions = torch.arange(n)
            self._tables[n] = [
                (torch.cat([head.of(positions) + count * index for index, head in enumerate(heads)]),
                 torch.stack([head.lifetimes(positions) for head in heads]))
                for heads, count in zip(self.heads[: self.cycle], self.slots)
            ]  # fmt: skip
            while len(self._tables) > 1 and sum(self._tables) > TABLE_POSITIONS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(n)
        return self._tables[n]

    def store(self, block: int, keys: Tensor, values: Tensor, kept: Sequence[Tensor]) -> None:
        """Stores prompts, [prompts, heads, n, d]. `kept`: from `kept_slots`."""
        source, slot = kept[block % self.cycle]
        for cached, new in ((self.keys[block], keys), (self.values[block], values)):
            rows = new.flatten(0, 2).index_select(0, source)
            cached.flatten(0, 2).index_copy_(0, slot, rows.to(cached.dtype))

    def copy(self, source: int, target: int, n: int) -> None:
        """Makes what one sequence of the batch keeps of its first n positions that of another."""
        for block in range(len(self.rows)):
            _, slot = self._kept(block % self.cycle, n)
            for cached in self.rows[block]:
                cached[target].index_copy_(0, slot, cached[source].index_select(0, slot))

    def _kept(self, entry: int, n: int) -> tuple[Tensor, Tensor]:
        """Returns which of the first n positions are kept, as indices into heads * n, and their slots, into heads * slots.
        The last of each entry of the cycle are kept, for its other blocks and the next prompt of that length."""
        if entry not in self._indices or self._indices[entry][0] != n:
            heads, slots, device = self.heads[entry], self.slots[entry], self.all_keys.device
            positions = [head.kept(n) for head in heads]
            source = torch.cat([kept + n * index for index, kept in enumerate(positions)])
            slot = torch.cat([head.of(kept) + slots * index for index, (head, kept) in enumerate(zip(heads, positions))])
            self._indices[entry] = n, send(source, device), send(slot, device)
        return self._indices[entry][1:]

    def add(self, block: int, view: View, key: Tensor, value: Tensor) -> None:
        """Stores one position, [batch, heads, d]. `view`: says in which slots."""
        for cached, new in zip(self.rows[block], (key, value)):
            kept = new if view.keeping is None else new.index_select(1, view.keeping)
            cached.index_copy_(1, view.own, kept.to(cached.dtype))


def block_slots(config: ModelConfig, block: int, length: int | None = None) -> tuple[Slots, ...]:
    """Returns the slots of each head of a block, for `length` positions or the whole context."""
    return tuple(slots(pattern, config.context if length is None else length) for pattern in config.patterns(block))
