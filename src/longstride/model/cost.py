"""Cost of a network, from the config alone: parameters, and the flops and memory of a training step.

Memory is the peak of a step: float32 weights with gradients and Adam's two moments, the saved activations, and one block in
the backward pass. The allocator needs somewhat more.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from longstride.common.checks import short_repr
from longstride.common.device import memory_bytes
from longstride.model.config import BYTES, ModelConfig
from longstride.model.layers import part_count
from longstride.patterns import Pattern, total_pairs

BYTES_PER_WEIGHT = 16
"""The weight, its gradient, and Adam's two moments, in float32."""


@dataclass(frozen=True)
class Cost:
    parameters: int
    flops: int
    """Flops of a training step: forward, backward and recomputation."""
    memory: int
    """Peak bytes of a training step."""


def cost(config: ModelConfig, batch: int = 1) -> Cost:
    parameters = parameter_count(config)
    return Cost(parameters, batch * step_flops(config), BYTES_PER_WEIGHT * parameters + kept_bytes(config, batch))


def parameter_count(config: ModelConfig) -> int:
    """Returns SparseTransformer.parameter_count() in closed form."""
    return config.parameters


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
    linear = 2 * n * config.layers * (width * (2 * qk + width) + width * width + 2 * width * ff)
    pairs = total_pairs(pattern_counts(config), n)
    attention = 2 * (qk + width) // config.heads * pairs
    backward = 2 * (3 * qk + 2 * width) // config.heads * pairs
    needed = linear - 2 * n * config.layers * width * ff  # No gradient needs the output of W_2.
    recomputed = {"off": 0, "selective": needed, "on": needed + attention}[config.recompute]
    return 3 * linear + attention + backward + recomputed + 4 * 2 * n * width * BYTES


def kept_bytes(config: ModelConfig, batch: int = 1) -> int:
    """Bytes of saved activations, plus the largest temporary: a block in the backward pass or a chunk of logits."""
    n, width = batch * config.context, config.width
    size = getattr(torch, config.precision).itemsize
    block = n * _block_bytes(config)
    if (
        config.recompute != "off"
    ):  # The feed-forward network is recomputed in parts, each with six tensors of the inner width.
        inner = n * size * config.ff_width
        block += 6 * inner // part_count(inner) - 2 * inner
    attention = n * (size * width + 4 * config.heads)
    kept = {"off": block, "on": size * n * width, "selective": size * n * width + attention}[config.recompute]
    embedding = 4 * n * width + size * n * width  # float32, and in the blocks' dtype
    logits = (
        batch * min(config.chunk, config.context) * (3 * BYTES + 3 * width) * 4
    )  # logits, probabilities, their gradient; H_N, its norm, its gradient
    gradients = 2 * size * n * width  # gradients of H, before and after a block
    temporary = logits if config.recompute == "off" else max(logits, block)
    return config.layers * kept + embedding + gradients + temporary


def _block_bytes(config: ModelConfig) -> int:
    """Bytes that a block saves per position: the inputs that its gradients need."""
    size = getattr(torch, config.precision).itemsize
    width, wide = config.width, 2 * config.qk_width + config.width
    mask = 2 * width if config.dropout else 0
    changed = 2 if config.is_rotary or config.qk_norm else 0  # Queries and keys once more, rotated or normalised,
    changed += config.qk_norm  # and normalised queries for the gradient of their scale.
    attention = size * (width + wide + width + changed * config.qk_width) + 4 * config.heads
    feed_forward = size * (width + width + 2 * config.ff_width)
    statistics = 2 * 2 * 4  # mean and deviation of two norms
    return mask + size * width + attention + feed_forward + statistics


def pattern_counts(config: ModelConfig) -> Counter[Pattern]:
    """Counts the heads with each pattern, over all blocks."""
    counts: Counter[Pattern] = Counter()
    for heads, blocks in config.block_counts.items():
        for pattern, count in Counter(heads).items():
            counts[pattern] += count * blocks
    return counts
