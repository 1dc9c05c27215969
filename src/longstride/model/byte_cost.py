"""What one more byte costs, without building anything: the weights and keys that a step reads, and the cache.

Shapes and dtypes are those of sampling: keys in float32, values and matrices as the model's precision rounds them.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from longstride.attention.slots import Slots, slots
from longstride.model.config import BYTES, ModelConfig
from longstride.model.cost import parameter_count, pattern_counts
from longstride.patterns import Block, Leaf, Pattern, Summary, total_pairs, union

KEY_BYTES = FLOAT_BYTES = 4


@dataclass(frozen=True)
class Kept:
    """What heads of one kind keep for a stream, in all blocks together."""

    pattern: Pattern
    """Of one of them: others may have other parts of the summary."""
    heads: int
    slots: str
    """What they are, in words."""
    count: int
    """Slots of a head. A block has room in each head for as many as its fullest one needs."""
    seen: int
    """Keys that the last query of the context sees."""
    bytes: int


def value_bytes(config: ModelConfig) -> int:
    """Of one number of a value, or of a matrix."""
    return min(FLOAT_BYTES, getattr(torch, config.precision).itemsize)


def weight_bytes(config: ModelConfig) -> int:
    """All weights: the blocks' matrices as the precision has them, the rest in float32."""
    return FLOAT_BYTES * parameter_count(config) - (FLOAT_BYTES - value_bytes(config)) * _matrix_weights(config)


def slot_bytes(config: ModelConfig) -> int:
    """A key and a value of every head of a block."""
    return config.qk_width * KEY_BYTES + config.width * value_bytes(config)


def step_bytes(config: ModelConfig, batch: int, first: int, steps: int) -> float:
    """What a step reads at least: weights once, and the keys and values that each stream sees; a mean of the steps from
    position `first` on. Of the embeddings a step reads some rows, which count for nothing."""
    tables = FLOAT_BYTES * config.width * (BYTES + 1 + sum(config.positions.sizes))
    each = slot_bytes(config) / config.heads
    return weight_bytes(config) - tables + batch * each * keys_seen(config, first, steps)


def keys_seen(config: ModelConfig, first: int, steps: int = 1) -> float:
    """By a byte in all heads of all blocks; a mean of the steps from position `first` on."""
    counts = pattern_counts(config)
    return (total_pairs(counts, first + steps) - total_pairs(counts, first)) / steps


def dense_cache_bytes(config: ModelConfig) -> int:
    """Of one stream, if every head saw everything."""
    return config.layers * config.context * slot_bytes(config)


def kept(config: ModelConfig) -> list[Kept]:
    """By kind of pattern, in the order of the blocks."""
    found: dict[Pattern, Kept] = {}
    last = config.context - 1
    for heads, blocks in config.block_counts.items():
        counts = Counter(heads)
        each = {pattern: slots(pattern, config.context) for pattern in counts}
        room = max(one.count for one in each.values()) * slot_bytes(config) // config.heads
        for pattern, count in counts.items():
            kind = union(*(_first_part(leaf) for leaf in pattern.leaves))
            if kind not in found:
                seen = pattern.pairs(last + 1) - pattern.pairs(last)
                found[kind] = Kept(kind, 0, _in_words(each[pattern]), each[pattern].count, seen, 0)
            before, more = found[kind], count * blocks
            found[kind] = replace(before, heads=before.heads + more, bytes=before.bytes + more * room)
    return list(found.values())


def _matrix_weights(config: ModelConfig) -> int:
    width = config.width
    return config.layers * (width * (2 * config.qk_width + width) + width * width + 2 * width * config.ff_width)


def _first_part(leaf: Leaf) -> Leaf:
    return replace(leaf, part=0) if isinstance(leaf, Summary) else leaf


def _in_words(head: Slots) -> str:
    if head.everything:
        return f"all {head.count:,}"
    parts = []
    if head.ring:
        block = any(isinstance(leaf, Block) and leaf.l == head.ring for leaf in head.pattern.leaves)
        parts.append(f"block of {head.ring:,}" if block else f"ring of {head.ring:,}")
    if head.ring_start:
        parts.append(f"{head.ring_start:,} cells")
    return " + ".join(parts)
