"""Estimated time of a training step on an H200: flops and bytes, each divided by a rate that was measured there.

Products, attention, passes over memory, gaps between the kernels of a captured step, and copies to the host are added up.
Errors of a fifth are usual, estimates of CIFAR-10 and ImageNet-64 with dense attention are 22 % too low, and other GPUs have
other rates: an estimate to choose with, not a promise.
"""

from collections import Counter

from longstride.model.block_in_parts import group_count
from longstride.model.config import BYTES, ModelConfig
from longstride.model.cost import pattern_counts
from longstride.model.recompute import IN_PARTS
from longstride.patterns import total_pairs
from longstride.training.config import TrainConfig

MATRIX_RATE = 650e12
"""Flops per second of matrix products in bfloat16 or float16."""
FLOAT_RATE = 45e12
"""The same in float32."""
ATTENTION_RATE = 400e12
"""Flops per second of attention over the pairs of a pattern."""
ATTENTION_PASSES = 4, 9
"""Passes of attention over memory, forward and backward, in tensors of the width."""
BANDWIDTH = 3.6e12
"""Bytes per second between the GPU and its memory."""
LINK = 50e9
"""Bytes per second between the GPU and the host."""
FORWARD_PASSES, BACKWARD_PASSES = (7, 2), (14, 4)
"""Passes over memory around the products of a block: over tensors of the width, and of the feed-forward's inner width."""
DROPOUT_PASSES = 3, 3
"""Passes that take as long as dropout, whose masks are drawn, in tensors of the width."""
LAUNCHES = 1e-4
"""Seconds between the kernels of a block, in both passes."""
PARTS_PASSES = 75
"""Passes that take as long as the many short kernels of a block in parts do besides, in tensors of the width."""
EAGER = {"layer": 1.1, "rms": 3.0}
"""How many times as long passes take without the compiler, by the norm; "rms" was measured before RMS norms had kernels."""


def step_seconds(config: TrainConfig, processes: int = 1) -> float:
    """Seconds of a step of a run."""
    model = config.model
    rows = config.batch // processes // config.accumulate
    choices = Counter(model.recomputed)
    blocks = sum(count * block_seconds(model, rows, choice, config.compile) for choice, count in choices.items())
    loss = 4 * 2 * rows * model.context * model.width * BYTES / FLOAT_RATE
    weights = 28 * model.parameters / BANDWIDTH  # Adam reads and writes the weight and two moments, and reads the gradient.
    sums = 12 * (config.accumulate - 1) * model.parameters / BANDWIDTH  # Gradients of a part are added to the sum.
    return config.accumulate * (blocks + loss) + weights + sums


def block_seconds(model: ModelConfig, rows: int, choice: str, compiled: bool) -> float:
    """Seconds of a block in both passes; the mean over the patterns of the blocks. Blocks in parts are never compiled."""
    n, width, qk, ff = rows * model.context, model.width, model.qk_width, model.ff_width
    size = model.dtype.itemsize
    rate = MATRIX_RATE if size == 2 else FLOAT_RATE
    attention_rate = ATTENTION_RATE if size == 2 else FLOAT_RATE / 2
    project, outer = 2 * n * width * (2 * qk + width) / rate, 2 * n * width * ff / rate
    linear = project + 2 * n * width * width / rate + 2 * outer
    pairs = rows * total_pairs(pattern_counts(model), model.context) / model.layers / model.heads

    eager = 1.0 if compiled and choice not in IN_PARTS else EAGER[model.norm]

    def passes(wide: float, inner: float = 0, times: float = 1) -> float:
        return times * size * n * (wide * width + inner * ff) / BANDWIDTH

    attend = 2 * (qk + width) * pairs / attention_rate + passes(ATTENTION_PASSES[0])
    attend_backward = 2 * (3 * qk + 2 * width) * pairs / attention_rate + passes(ATTENTION_PASSES[1])
    dropped, dropped_backward = (passes(count if model.dropout else 0) for count in DROPOUT_PASSES)
    forward = linear + attend + passes(*FORWARD_PASSES, eager) + dropped + LAUNCHES / 3
    backward = 2 * linear + attend_backward + passes(*BACKWARD_PASSES, eager) + dropped_backward + 2 * LAUNCHES / 3
    if choice == "off":
        return forward + backward
    again = LAUNCHES / 3 + dropped + linear - outer + passes(FORWARD_PASSES[0], FORWARD_PASSES[1] - 1, eager)
    if choice != "selective":
        again += attend
    if choice in IN_PARTS:
        groups = group_count(model.heads, n * size * (2 * qk + width))
        again += passes(PARTS_PASSES) + project * ((groups > 1) + model.qk_norm)
    if choice == "again":  # The block before it computes its input.
        again += forward + passes(PARTS_PASSES / 3)
    if choice == "host":  # Copies that take longer than what is computed beside them.
        copy = size * n * width / LINK
        again += max(0.0, copy - forward) + max(0.0, copy - backward - again) + passes(40)
    return forward + backward + again
