"""What fits into a GPU's memory: the recomputation of each block, and accumulation, with predicted memory and time.

Recomputation is chosen greedily. All blocks begin with the choice that needs the least memory. Then one block after another
gets the choice that saves the most time per byte kept, as long as the predicted peak fits. Blocks that keep the least come
first in the network: their backward passes come last, when the others' tensors have been freed. If neither the GPU nor the
host can keep an input for each block, segments of blocks keep one.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longstride.model.memory import StepMemory, forward_bytes, host_bytes, kept_bytes, step_memory
from longstride.model.recompute import segments, write
from longstride.training import capture
from longstride.training.config import TrainConfig
from longstride.training.muon import LARGEST_STACK
from longstride.training.ranks import Ranks
from longstride.training.step_time import block_seconds, step_seconds

CONTEXT_BYTES = 7 * 2**27
"""Memory of the CUDA context and of libraries, outside of PyTorch's tensors."""
MARGIN = 0.06
"""Share of the memory that is left free, for fragments and errors of the prediction."""
HOST_SHARE = 0.8
"""Share of the host's free memory that inputs of blocks may take."""
WORTHWHILE = 0.97
"""Share of the time that a step in more parts may take at most: short products are slower than estimated."""
MUON_BYTES = 20
"""Bytes of temporary tensors for each number of a stack of matrices."""


@dataclass(frozen=True)
class Plan:
    config: TrainConfig
    memory: StepMemory
    seconds: float
    """Of a step, estimated for an H200."""


def make_plan(config: TrainConfig, memory: int, host: int | None = None, processes: int = 1) -> Plan | None:
    """Returns the fastest plan for the given batch: recomputation if it is "auto", and accumulation where a step fits only
    so, or takes less time. None if nothing fits. `memory`: of the GPU, in bytes; `host`: free memory of the host.

    Fewer sequences at a time leave memory for what would be recomputed. FSDP gathers all weights for each part.
    """
    host = free_host_memory() if host is None else host
    first_is_best = config.model.recompute != "auto" or (config.parallel == "fsdp" and processes > 1)
    found: Plan | None = None
    for accumulate in accumulations(config, processes):
        plan = recomputation_plan(replace(config, accumulate=accumulate), memory, host, processes)
        if plan is not None and (found is None or plan.seconds < WORTHWHILE * found.seconds):
            found = plan
        if found is not None and (first_is_best or found.config.model.recompute == "off"):
            break
    return found


def accumulations(config: TrainConfig, processes: int) -> list[int]:
    """Returns the numbers of parts to try, from that of the config on."""
    rows = config.batch // processes
    return [parts for parts in range(config.accumulate, rows + 1) if rows % parts == 0] or [config.accumulate]


def nearest_plan(config: TrainConfig, memory: int, host: int | None = None, processes: int = 1) -> Plan | None:
    """Returns the plan with the longest context that fits; None if not even a short one does.

    The context is the given one divided by a power of two. The batch is the given one if it fits in parts, which need
    memory for the sum of their gradients; else one sequence for each process."""
    one_each = replace(config, batch=processes, accumulate=1)
    context = config.model.context
    while context > 1:
        context //= 2
        for start in (config, one_each):
            try:
                plan = make_plan(replace(start, model=replace(start.model, context=context)), memory, host, processes)
            except ValueError:  # An image has the context that it has.
                return None
            if plan is not None:
                return plan
    return None


def largest_batch(config: TrainConfig, memory: int, host: int | None = None) -> Plan | None:
    """Returns the plan with the most sequences in one part, by doubling and halving."""
    config = replace(config, accumulate=1)

    def fits(batch: int) -> Plan | None:
        return recomputation_plan(replace(config, batch=batch), memory, free_host_memory() if host is None else host)

    best, low, high = fits(1), 1, 2
    if best is None:
        return None
    while (plan := fits(high)) is not None and high < 2**20:
        best, low, high = plan, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        plan = fits(middle)
        best, low, high = (plan, middle, high) if plan is not None else (best, low, middle)
    return best


def predict(config: TrainConfig, processes: int = 1) -> StepMemory:
    """Predicts the memory of a step of a run, and of a validation."""
    model = config.model
    matrices = model.layers * model.block_matrix_parameters
    states, temporary = 8 * model.parameters, 0
    if config.optimizer.name == "muon":
        states -= 4 * matrices
        largest = model.layers * model.width * max(2 * model.qk_width + model.width, model.ff_width)
        temporary = MUON_BYTES * min(LARGEST_STACK, largest)
    elif config.optimizer.name == "adafactor":
        states = 0
    if config.ema:
        states += 4 * model.parameters
    rows = config.batch // processes // config.accumulate
    shares = processes if config.parallel == "fsdp" else 1
    # DDP keeps the buckets of gradients from step to step.
    keeps_gradients = config.accumulate > 1 or processes > 1
    memory = step_memory(model, rows, states, temporary, keeps_gradients, shares)
    # A CUDA graph keeps the memory of the whole step.
    is_captured = capture.choose(config, torch.device("cuda"), Ranks(count=processes)) is None
    held = memory.peak if is_captured else memory.weights * (1 + keeps_gradients) + memory.states
    return replace(memory, validation=held + forward_bytes(model, 1))


def validation_rows(config: TrainConfig, gpu: int, processes: int = 1) -> int:
    """Returns how many sequences to validate at a time: as many as a step has at a time, or as fit; at least one."""
    rows, memory = config.batch // processes // config.accumulate, predict(config, processes)
    room = _usable_in_validation(gpu) - memory.validation
    one = forward_bytes(config.model, 1)
    fitting = (count for count in range(rows, 1, -1) if forward_bytes(config.model, count) - one <= room)
    return next(fitting, 1)


def fits(memory: StepMemory, gpu: int, host: int) -> bool:
    of_gpu = memory.peak <= usable(gpu) and memory.validation <= _usable_in_validation(gpu)
    return of_gpu and memory.host <= HOST_SHARE * host


def usable(memory: int) -> int:
    """Bytes for tensors in a GPU of this memory."""
    return int((memory - CONTEXT_BYTES) * (1 - MARGIN))


def _usable_in_validation(memory: int) -> int:
    """Bytes for tensors while a validation runs, which is predicted without the errors of a whole step."""
    return int((memory - CONTEXT_BYTES) * (1 - MARGIN / 2))


def free_host_memory() -> int:
    """Free memory of this machine, in bytes; 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def recomputation_plan(config: TrainConfig, gpu: int, host: int, processes: int = 1) -> Plan | None:
    """Returns the plan with the config's accumulation and recomputation; if that is "auto", with the fastest that fits."""

    def plan_of(recompute: str) -> Plan | None:
        made = replace(config, model=replace(config.model, recompute=recompute))
        memory = predict(made, processes)
        return Plan(made, memory, step_seconds(made, processes)) if fits(memory, gpu, host) else None

    if config.model.recompute != "auto":
        return plan_of(config.model.recompute)
    # FSDP gathers a block's weights around its forward and backward pass, which blocks in parts do not have.
    in_parts = config.parallel != "fsdp" or processes == 1
    choices = ["off", "selective", "on", *(("parts", "host") if in_parts else ())]
    rows = config.batch // processes // config.accumulate
    kept = {choice: kept_bytes(config.model, rows, choice) for choice in choices}
    seconds = {choice: block_seconds(config.model, rows, choice, config.compile) for choice in choices}
    layers = config.model.layers
    starts = [Counter({choice: layers}) for choice in reversed(choices)]
    if "host" in choices:  # As many inputs as the host can have.
        in_host = min(layers, int(HOST_SHARE * host) // host_bytes(config.model, rows))
        starts[0] = Counter({"host": in_host, "parts": layers - in_host})
    # A choice that keeps less may have larger temporary tensors.
    found = ((counts, plan_of(_text(counts, choices))) for counts in starts)
    counts, best = next(((counts, plan) for counts, plan in found if plan is not None), (starts[0], None))
    if best is None and in_parts:  # Shorter segments recompute fewer inputs.
        texts = (segments(first, length, layers) for length in range(2, layers + 1) for first in ("parts", "host"))
        return next((plan for plan in map(plan_of, texts) if plan is not None), None)
    while best is not None:
        for before, after in _upgrades(counts, kept, seconds):
            changed = counts + Counter({after: 1}) - Counter({before: 1})
            plan = plan_of(_text(changed, choices))
            if plan is not None:
                best, counts = plan, changed
                break
        else:
            break
    return best


def _upgrades(counts: Counter[str], kept: dict[str, int], seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the faster choices for a block, those first that save the most time per byte."""
    rated = [
        ((seconds[before] - seconds[after]) / max(1, kept[after] - kept[before]), before, after)
        for before in counts
        for after in kept
        if counts[before] and seconds[after] < seconds[before]
    ]
    return [(before, after) for _, before, after in sorted(rated, reverse=True)]


def _text(counts: Counter[str], choices: Sequence[str]) -> str:
    return write([choice for choice in reversed(choices) for _ in range(counts[choice])])
