"""The memory that a run may take on its GPU: resolves `recompute = "auto"`, limits PyTorch, and says what would fit."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from longstride.common.checks import size_in_bytes
from longstride.common.device import GIB, memory_bytes
from longstride.common.out_of_memory import is_out_of_gpu_memory
from longstride.model.pinned import PinError
from longstride.model.recompute import AUTO
from longstride.training.checkpoint import newest_checkpoint
from longstride.training.config import Resume, TrainConfig
from longstride.training.plan import (
    CONTEXT_BYTES,
    HOST_SHARE,
    MARGIN,
    Plan,
    make_plan,
    nearest_plan,
    predict,
    validation_rows,
)
from longstride.training.ranks import Ranks

SHRINK = 0.85
"""After a lack of memory, settings are suggested that are predicted to take this share of the memory."""


def resolve_recomputation(
    config: TrainConfig, resume: Resume, ranks: Ranks, say: Callable[[str], None]
) -> TrainConfig:  # fmt: skip
    """Returns the config with a choice of recomputation for each block, and accumulation, if recomputation is "auto"; those
    of the run, if it is resumed.

    ValueError if nothing fits, or if the config has its own recomputation and does not fit into `gpu_memory`.
    """
    path = config.folder() / "config.json"
    auto = config.model.recompute == AUTO
    if auto and resume and path.is_file():
        return _with_saved_choices(config, TrainConfig.read(path), ranks.count)
    if not auto and not config.gpu_memory:
        return config
    device = ranks.run_on_all(lambda: ranks.device(config.device))
    memory = -ranks.maximum(-ranks.run_on_all(lambda: available_memory(config, device)))
    if not auto:
        ranks.run_on_all(lambda: _check(config, memory, ranks.count))
        return config
    plan = make_plan(config, memory, processes=ranks.count)
    if plan is None:
        raise ValueError(_refusal(config, memory, ranks.count))
    chosen = plan.config
    more = f", accumulate {chosen.accumulate}" if chosen.accumulate != config.accumulate else ""
    host = f", and {plan.memory.host / GIB:.1f} GiB of host memory" if plan.memory.host else ""
    say(
        f"recompute {chosen.model.recompute}{more}: predicted peak {plan.memory.peak / GIB:.1f} GiB of "
        f"{memory / GIB:.1f}{host}"
    )
    return chosen


def _with_saved_choices(config: TrainConfig, saved: TrainConfig, processes: int) -> TrainConfig:
    """Returns the config with recomputation and accumulation of the run, or with the most parts up to these that divide the
    sequences of a process."""
    divisors = (parts for parts in range(1, saved.accumulate + 1) if config.batch % (processes * parts) == 0)
    accumulate = max(divisors, default=saved.accumulate)
    return replace(config, accumulate=accumulate, model=replace(config.model, recompute=saved.model.recompute))


def available_memory(config: TrainConfig, device: torch.device) -> int:
    """Bytes that the run may take: those of `gpu_memory`, or all that are free."""
    given = size_in_bytes("train", "gpu_memory", config.gpu_memory) if config.gpu_memory else None
    if device.type != "cuda":
        return given or memory_bytes(device) or 0
    free, total = torch.cuda.mem_get_info(device)
    if given is not None and given > total + GIB:
        raise ValueError(
            f"train: gpu_memory = {config.gpu_memory!r} is more than the GPU's {total / GIB:.1f} GiB; give less"
        )
    return given or free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES


def validation_batch(config: TrainConfig, device: torch.device, processes: int = 1) -> int:
    """Returns how many sequences to validate at a time. It depends on the config and the GPU, not on what is free now."""
    if config.gpu_memory:
        memory = size_in_bytes("train", "gpu_memory", config.gpu_memory)
    elif device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        return config.batch // processes // config.accumulate
    return validation_rows(config, memory, processes)


@contextmanager
def memory_limit(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context in which PyTorch takes no more memory of the GPU than `gpu_memory`."""
    if not config.gpu_memory or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = (size_in_bytes("train", "gpu_memory", config.gpu_memory) - CONTEXT_BYTES) / total
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


@contextmanager
def with_advice(config: TrainConfig, device: torch.device, processes: int) -> Iterator[None]:
    """Context that adds the settings that would fit, as `advice`, to a lack of GPU memory or of pinned host memory."""
    try:
        yield
    except (RuntimeError, PinError) as error:
        if isinstance(error, PinError) or is_out_of_gpu_memory(error):
            with suppress(RuntimeError):  # A GPU that no longer answers.
                memory, step = available_memory(config, device), newest_checkpoint(config.folder() / "checkpoints")
                error.advice = advice(config, memory, processes, isinstance(error, PinError), step)  # type: ignore[union-attr]
        raise


def advice(
    config: TrainConfig, memory: int, processes: int = 1, of_host: bool = False, checkpoint: Path | None = None
) -> str:  # fmt: skip
    """Names settings that take less memory than those of the config, which did not fit.

    `of_host`: what lacked was pinned host memory. `checkpoint`: the run may be resumed from it, with the same recomputation.
    """
    predicted, host = predict(config, processes), None
    if of_host:
        host = int(SHRINK * predicted.host / HOST_SHARE)
    else:
        memory = int(min(memory, SHRINK * min(memory, predicted.peak + CONTEXT_BYTES)))
    if checkpoint is not None:
        plan = make_plan(config, memory, host, processes)
        if plan is not None and plan.config.accumulate > config.accumulate:
            return f"This should fit: --resume --accumulate {plan.config.accumulate}."
    auto = replace(config, model=replace(config.model, recompute=AUTO))
    plan = make_plan(auto, memory, host, processes)
    if plan is not None and checkpoint is not None:
        words = f"--init-from {shlex.quote(str(checkpoint))} {flags(plan, config)}"
        return f"To resume takes as much memory; a new run from these weights, with another --out, should fit: {words}."
    if plan is not None:
        return f"These settings should fit, with another --out: {flags(plan, config)}."
    plan = nearest_plan(auto, memory, host, processes)
    if plan is not None:
        return f"The nearest that should fit, with another --out: {flags(plan, config)}."
    return "Use a smaller network."


def flags(plan: Plan, config: TrainConfig) -> str:
    """The flags of `longstride train` that turn the config into the plan's."""
    chosen = plan.config
    given = [f"--model.recompute '{chosen.model.recompute}'"]
    if chosen.model.context != config.model.context:
        given.append(f"--model.context {chosen.model.context}")
    for name in ("batch", "accumulate"):
        if getattr(chosen, name) != getattr(config, name):
            given.append(f"--{name} {getattr(chosen, name)}")
    return " ".join(given)


def _check(config: TrainConfig, memory: int, processes: int) -> None:
    """Raises ValueError if the config's own recomputation is predicted to take more than the memory."""
    predicted = predict(config, processes)
    if max(predicted.peak, predicted.validation) + CONTEXT_BYTES > memory:
        raise ValueError(_refusal(config, memory, processes))


def _refusal(config: TrainConfig, memory: int, processes: int) -> str:
    if config.model.recompute == AUTO:
        config = replace(config, model=replace(config.model, recompute="host"))
    predicted = predict(config, processes)
    need = max(predicted.peak, predicted.validation) + CONTEXT_BYTES
    name = f"gpu_memory = {config.gpu_memory!r}" if config.gpu_memory else "the GPU's free memory"
    auto = replace(config, model=replace(config.model, recompute=AUTO))
    plan = make_plan(auto, memory, processes=processes) or nearest_plan(auto, memory, processes=processes)
    fix = f"this fits: {flags(plan, config)}" if plan is not None else "make the network smaller"
    return (
        f"train: {name} is {memory / GIB:.2f} GiB, and a step of batch = {config.batch}, accumulate = {config.accumulate}, "
        f"context = {config.model.context:,} and recompute = {config.model.recompute!r} takes {need / GIB:.2f} GiB, "
        f"beside {MARGIN:.0%} that stay free; {fix}"
    )
