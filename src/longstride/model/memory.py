"""Peak memory of a training step, from the config alone.

A step has phases: the embedding, the forward pass, which keeps tensors for each block as its recomputation says, the loss,
the backward pass block by block, which frees them while gradients of weights are added, and the optimizer. The peak is that
of the phase that needs the most. It is the peak of PyTorch's tensors; the CUDA context comes on top.

In comments, U is a tensor [batch, n, width] in the precision of activations.
"""

from dataclasses import dataclass

from longstride.model import block_in_parts, feed_forward
from longstride.model.block_in_parts import group_count
from longstride.model.config import BYTES, ModelConfig
from longstride.model.recompute import segment_slices

WEIGHT_BYTES = 4
"""Bytes of a weight, of its gradient, and of each of Adam's two moments: float32."""
ADAM_BYTES = 2 * WEIGHT_BYTES
WORKSPACE = 2**26
"""Workspace of cuBLAS."""
TABLES = 3
"""Tensors in float32 that the embedding has at a time: the sum so far, the next table's, and the new sum."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the peak of a step."""

    weights: int
    states: int
    """States of the optimizer, and the average of the weights."""
    gradients: int
    """Gradients of the weights."""
    kept: int
    """What the forward pass keeps for the backward pass."""
    working: int
    """Temporary tensors of the phase that has the peak."""
    phase: str
    """The phase that has the peak."""
    host: int
    """Bytes of inputs in pinned host memory."""
    validation: int = 0
    """Bytes at the peak of a validation of one sequence; 0 if unknown."""

    @property
    def peak(self) -> int:
        return self.weights + self.states + self.gradients + self.kept + self.working


def step_memory(
    config: ModelConfig, batch: int = 1, states: int | None = None, optimizer: int = 0, accumulate: bool = False,
    shares: int = 1,
) -> StepMemory:  # fmt: skip
    """`batch`: sequences of a forward pass. `states`: bytes of the optimizer's states, by default Adam's. `optimizer`: bytes
    of its temporary tensors. `accumulate`: gradients exist before the forward pass. `shares`: processes that share weights,
    gradients and states."""
    n = batch * config.context
    width, size = config.width, _size(config)
    unit = size * n * width
    weights = WEIGHT_BYTES * config.parameters // shares
    block_gradients = WEIGHT_BYTES * config.block_parameters // shares
    outside = weights - config.layers * block_gradients
    states = (ADAM_BYTES * config.parameters if states is None else states) // shares
    kept = [kept_bytes(config, batch, choice) for choice in config.recomputed]
    last = segment_slices(config.recomputed)[-1]
    in_flight = unit if config.recomputed[last.start] == "host" else 0  # Its input is still on the device.
    table = 4 * n * width
    chunk = min(config.chunk, n)
    # H_N, the gradients of its chunks, and these joined. Logits, probabilities, their gradient; H_N, its norm, its gradient.
    loss = 3 * unit + chunk * (3 * BYTES + 3 * width) * 4
    before = weights if accumulate else 0
    phases = [
        ("the embedding", before, 0, TABLES * table + unit),
        ("the loss", before, sum(kept), in_flight + loss),
    ]
    gradients, kept_now = max(before, outside), sum(kept)
    work = {choice: working_bytes(config, batch, choice) for choice in set(config.recomputed)}
    if shares > 1:  # The weights of a block are gathered, and its gradients not yet shared.
        work = {choice: working + 2 * shares * block_gradients for choice, working in work.items()}
    for segment in reversed(segment_slices(config.recomputed)):
        first = config.recomputed[segment.start]
        for block in reversed(range(segment.start, segment.stop)):
            inputs = (block - segment.start) * unit  # Recomputed ones, besides that of the segment.
            phases.append((f"the backward pass of block {block}", gradients, kept_now, inputs + work[first]))
            gradients = min(weights, gradients + block_gradients)
        kept_now -= kept[segment.start]
    phases.append(("the gradient of the embedding", weights, 0, unit + 2 * table))
    phases.append(("the optimizer", weights, 0, optimizer))
    phase, gradients, kept_now, working = max(phases, key=lambda phase: sum(phase[1:]))
    buffers = config.recomputed.count("host") * host_bytes(config, batch)
    return StepMemory(weights, states, gradients, kept_now, working + WORKSPACE, phase, buffers)


def kept_bytes(config: ModelConfig, batch: int, choice: str) -> int:
    """Bytes that a block keeps on the device from the forward to the backward pass."""
    n, width, size = batch * config.context, config.width, _size(config)
    unit = size * n * width
    attention = unit + 4 * n * config.heads
    if choice == "off":
        return n * _saved_bytes(config) + 2 * n * size * config.ff_width + _cast_bytes(config)
    return {"selective": unit + attention, "on": unit, "parts": unit, "host": 0, "again": 0}[choice]


def working_bytes(config: ModelConfig, batch: int, choice: str) -> int:
    """Bytes of temporary tensors in the backward pass of a block, besides those that it keeps."""
    n, width, size = batch * config.context, config.width, _size(config)
    unit, inner = size * n * width, n * size * config.ff_width
    if choice == "off":
        return 2 * unit + 3 * inner
    masks = 2 * n * width if config.dropout else 0
    casts = _cast_bytes(config)
    if choice in ("on", "selective"):
        # The tensors of a block that recomputation saves, the gradient of its result, and that of a norm's output.
        saved = n * _saved_bytes(config) - unit + 2 * unit + casts
        if choice == "selective":
            saved -= kept_bytes(config, batch, choice) - unit
        dropped = 2 * unit if config.dropout else 0
        # A norm's gradient and its addition to the stream's. A part of the feed-forward network has six inner layers.
        return saved + dropped + max(2 * unit, 6 * inner // feed_forward.part_count(inner))
    qkv = n * size * (2 * config.qk_width + width)
    groups = group_count(config.heads, qkv)
    stats = 4 * n * config.heads
    held = 2 * unit if choice == "host" else 0  # The input, and that of the block before.
    held += 3 * unit + stats + casts  # The gradient of the stream, the output of attention, and its gradient.
    attention = 2 * qkv // groups + 2 * stats // groups
    changed = 2 * config.qk_width * 4 if config.is_rotary or config.qk_norm else 0
    parts = block_in_parts.block_part_count(inner)
    # Inner layer, gelu and their gradients; stream, norm, product and their gradients.
    after_attention = (qkv if groups == 1 else 0) + masks + (4 * inner + 6 * unit) // parts
    return held + max(attention, after_attention, qkv // groups + (n * changed + 2 * qkv // groups + 4 * unit) // parts)


def forward_bytes(config: ModelConfig, batch: int) -> int:
    """Bytes of temporary tensors in a forward pass without gradients, as validation has it."""
    n, width, size = batch * config.context, config.width, _size(config)
    unit, table, qk = size * n * width, 4 * n * width, n * config.qk_width
    changed = 12 * qk if config.is_rotary or config.qk_norm else 0  # Queries or keys in float32: before, after, and a half.
    # The stream, its norm, attention's output in two layouts, and the projected one, beside queries, keys and values.
    attention = 5 * unit + size * (2 * qk + n * width) + changed
    norm = 4 * unit + 2 * table  # The stream before and after an addition, what is added, and the norm, also in float32.
    inner = n * size * config.ff_width
    ff = (3 + 2 * (inner > feed_forward.PART_BYTES)) * unit + 3 * min(inner, feed_forward.PART_BYTES)
    loss = unit + min(config.chunk, n) * (3 * BYTES + 3 * width) * 4
    return max(TABLES * table + unit, attention, norm, ff, loss) + _cast_bytes(config)


def host_bytes(config: ModelConfig, batch: int) -> int:
    """Bytes of the pinned buffer for a block's input."""
    return _size(config) * batch * config.context * config.width


def _saved_bytes(config: ModelConfig) -> int:
    """Bytes that autograd saves of a block per position, without the inner layer: the inputs that its gradients need."""
    size = _size(config)
    width, wide = config.width, 2 * config.qk_width + config.width
    mask = 2 * width if config.dropout else 0
    changed = wide if config.qk_norm else 0  # Once more, before the norms: `query_key.py`.
    attention = size * (width + wide + width + changed) + 4 * config.heads
    ff = size * (width + width)
    statistics = 2 * 4 * (2 if config.norm == "layer" else 1)  # Scale, and of layer norms the mean, of two norms.
    return mask + size * width + attention + ff + statistics


def _cast_bytes(config: ModelConfig) -> int:
    """Bytes of a block's weights in the precision of activations, if that is not their own."""
    return 0 if _size(config) == WEIGHT_BYTES else _size(config) * config.block_parameters


def _size(config: ModelConfig) -> int:
    return config.dtype.itemsize
