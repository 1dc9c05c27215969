"""Cost of sampling one byte, from the config alone: bytes of weights and keys that a step reads, and of the cache.

Dtypes are those of sampling: keys in float32, values and matrices in the model's precision.
"""

from collections import Counter
from dataclasses import dataclass, replace

from longstride.model.config import ModelConfig
from longstride.model.cost import pattern_counts
from longstride.model.slots import Slots, slots
from longstride.patterns import Block, Leaf, Pattern, Summary, total_pairs, union

KEY_BYTES = FLOAT_BYTES = 4


@dataclass(frozen=True)
class CacheUse:
    """Cache use of all heads with one kind of pattern, over all blocks, for one stream."""

    pattern: Pattern
    """The pattern of one of these heads. Others may differ in the `part` of a Summary."""
    heads: int
    slots: str
    """Description of the slots of a head."""
    count: int
    """Slots that a head needs. A block allocates as many for each head as its largest head needs."""
    seen: int
    """Number of keys that the last query of the context sees."""
    bytes: int


def value_bytes(config: ModelConfig) -> int:
    """Bytes per element of values and matrices."""
    return min(FLOAT_BYTES, config.dtype.itemsize)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights: the blocks' matrices in the model's precision, the rest in float32."""
    matrices = config.layers * config.block_matrix_parameters
    return FLOAT_BYTES * config.parameters - (FLOAT_BYTES - value_bytes(config)) * matrices


def slot_bytes(config: ModelConfig) -> int:
    """Bytes of a key and a value for every head of a block."""
    return config.qk_width * KEY_BYTES + config.width * value_bytes(config)


def step_bytes(config: ModelConfig, batch: int, first: int, steps: int) -> float:
    """Returns the least bytes that a step reads: the weights once, and the keys and values that each stream sees.

    A mean over `steps` steps from position `first` on. Embedding tables are left out: a step reads few of their rows.
    """
    tables = FLOAT_BYTES * config.width * config.table_rows
    head_slot_bytes = slot_bytes(config) / config.heads
    return weight_bytes(config) - tables + batch * head_slot_bytes * keys_seen(config, first, steps)


def keys_seen(config: ModelConfig, first: int, steps: int = 1) -> float:
    """Returns the keys that a byte sees in all heads of all blocks; a mean over `steps` steps from position `first` on."""
    counts = pattern_counts(config)
    return (total_pairs(counts, first + steps) - total_pairs(counts, first)) / steps


def cache_bytes(config: ModelConfig, length: int | None = None) -> int:
    """Bytes of the cache of one stream, for `length` positions or the whole context."""
    n = config.context if length is None else length
    counts = [
        blocks * max(slots(pattern, n).count for pattern in set(heads)) for heads, blocks in config.block_counts.items()
    ]
    return sum(counts) * slot_bytes(config)


def dense_cache_bytes(config: ModelConfig) -> int:
    """Bytes of the cache of one stream, if every head were dense."""
    return config.layers * config.context * slot_bytes(config)


def kept(config: ModelConfig) -> list[CacheUse]:
    """Returns the cache use by kind of pattern, in the order of the blocks."""
    by_kind: dict[Pattern, CacheUse] = {}
    last = config.context - 1
    for heads, blocks in config.block_counts.items():
        counts = Counter(heads)
        head_slots = {pattern: slots(pattern, config.context) for pattern in counts}
        head_bytes = max(head.count for head in head_slots.values()) * slot_bytes(config) // config.heads
        for pattern, count in counts.items():
            kind = union(*(_first_part(leaf) for leaf in pattern.leaves))
            if kind not in by_kind:
                seen = pattern.pairs(last + 1) - pattern.pairs(last)
                by_kind[kind] = CacheUse(kind, 0, _describe_slots(head_slots[pattern]), head_slots[pattern].count, seen, 0)
            use, added_heads = by_kind[kind], count * blocks
            by_kind[kind] = replace(use, heads=use.heads + added_heads, bytes=use.bytes + added_heads * head_bytes)
    return list(by_kind.values())


def _first_part(leaf: Leaf) -> Leaf:
    return replace(leaf, part=0) if isinstance(leaf, Summary) else leaf


def _describe_slots(head: Slots) -> str:
    if head.keeps_all:
        return f"all {head.count:,}"
    parts = []
    if head.ring:
        block = any(isinstance(leaf, Block) and leaf.l == head.ring for leaf in head.pattern.leaves)
        parts.append(f"block of {head.ring:,}" if block else f"ring of {head.ring:,}")
    if head.ring_start:
        parts.append(f"{head.ring_start:,} cells")
    return " + ".join(parts)
