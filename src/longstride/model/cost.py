"""Cost of a network, from the config alone: parameters, and the flops and memory of a training step with Adam."""

from collections import Counter
from dataclasses import dataclass

import torch

from longstride.common.checks import short_repr
from longstride.common.device import memory_bytes
from longstride.model.block_in_parts import group_count
from longstride.model.config import BYTES, ModelConfig
from longstride.model.memory import step_memory
from longstride.model.placement import Heads
from longstride.model.recompute import IN_PARTS
from longstride.patterns import Pattern, total_pairs


@dataclass(frozen=True)
class Cost:
    parameters: int
    flops: int
    """Flops of a training step: forward, backward and recomputation."""
    memory: int
    """Peak bytes of a training step."""


def cost(config: ModelConfig, batch: int = 1) -> Cost:
    return Cost(config.parameters, batch * step_flops(config), step_memory(config, batch).peak)


def check_memory(config: ModelConfig, device: torch.device, shares: int = 1, bytes_per_weight: int = 4) -> None:
    """Raises ValueError if the weights alone exceed the device's memory. `shares`: devices that share the weights."""
    memory = None if device.type == "meta" else memory_bytes(device)
    needed = bytes_per_weight * config.parameters // shares
    if memory is not None and needed > memory:
        raise ValueError(
            f"config: layers = {config.layers:,}, width = {config.width:,}, context = {config.context:,} and embedding = "
            f"{short_repr(config.embedding)} make {config.parameters:,} weights, at least {needed / 2**30:,.1f} GiB of "
            f"memory, and {device.type} has {memory / 2**30:,.1f} GiB; make the network smaller"
        )


def step_flops(config: ModelConfig) -> int:
    """Flops for one sequence. Backward takes twice as many as forward; in attention, five products to forward's two."""
    n, width, qk, ff = config.context, config.width, config.qk_width, config.ff_width
    project = 2 * n * width * (2 * qk + width)
    linear = project + 2 * n * (width * width + 2 * width * ff)
    needed = linear - 2 * n * width * ff  # No gradient needs the output of W_2.
    groups = group_count(config.heads, n * config.dtype.itemsize * (2 * qk + width))
    total = 4 * 2 * n * width * BYTES
    for (heads, choice), blocks in Counter(zip(_all_patterns(config), config.recomputed)).items():
        attention, backward = _attention_flops(config, heads)
        recomputed = {"off": 0, "selective": needed}.get(choice, needed + attention)
        if choice in IN_PARTS:  # Queries, keys and values are computed once more for each reason.
            recomputed += project * ((groups > 1) + config.qk_norm)
        if choice == "again":  # The block before it computes its input.
            recomputed += linear + attention
        total += blocks * (3 * linear + attention + backward + recomputed)
    return total


def attention_flops(config: ModelConfig) -> int:
    """Flops of attention in a training step, for one sequence, without recomputation."""
    return sum(sum(_attention_flops(config, heads)) for heads in _all_patterns(config))


def _attention_flops(config: ModelConfig, heads: Heads) -> tuple[int, int]:
    """Flops of a block's attention, forward and backward."""
    pairs = total_pairs(Counter(heads), config.context)
    qk, width = config.qk_width, config.width
    return 2 * (qk + width) // config.heads * pairs, 2 * (3 * qk + 2 * width) // config.heads * pairs


def _all_patterns(config: ModelConfig) -> list[Heads]:
    """Returns the patterns of each block's heads."""
    cycle = config.cycle
    return [cycle[block % len(cycle)] for block in range(config.layers)]


def pattern_counts(config: ModelConfig) -> Counter[Pattern]:
    """Counts the heads with each pattern, over all blocks."""
    counts: Counter[Pattern] = Counter()
    for heads, blocks in config.block_counts.items():
        for pattern, count in Counter(heads).items():
            counts[pattern] += count * blocks
    return counts
