"""Settings that fit into a GPU's memory, with predicted memory and time: longstride plan"""

import shlex
from dataclasses import replace

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longstride.common.device import GIB
from longstride.training.config import TrainConfig
from longstride.training.plan import (
    CONTEXT_BYTES,
    MARGIN,
    WORTHWHILE,
    Plan,
    accumulations,
    free_host_memory,
    largest_batch,
    make_plan,
    nearest_plan,
    predict,
    recomputation_plan,
)
from longstride.training.presets import train_preset

MOST_ROWS = 8
"""Rows of the table."""


def show(
    preset: str, config: TrainConfig, memory: int | None, host: int | None = None, console: Console | None = None,
    given: str = "",
) -> None:  # fmt: skip
    """Prints what fits. `memory`: of the GPU, by default that of this machine's; `host`: of the host, by default free;
    `given`: the GPU's memory as the user wrote it. ValueError if not even a short context fits."""
    console = console or Console()
    memory = _own_memory() if memory is None else memory
    host = free_host_memory() if host is None else host
    model = config.model
    console.print(
        f"{preset}: {model.parameters / 1e6:.1f} million parameters, context {model.context:,}, {model.pattern}, "
        f"batch {config.batch}, {config.optimizer.name}\n"
        f"GPU {memory / 1e9:.1f} GB ({memory / GIB:.1f} GiB), host {host / GIB:.1f} GiB",
        highlight=False,
    )
    plan = make_plan(config, memory, host)
    if plan is None and model.recompute != "auto":
        config = _changed(config, "auto", config.accumulate)
        plan = make_plan(config, memory, host)
        if plan is not None:
            line = (
                f"\nWith recompute {model.recompute} nothing fits, with one sequence at a time, either. With auto this does:"
            )
            console.print(line, highlight=False, soft_wrap=True)
    if plan is None:
        least = predict(_changed(config, "host" if model.recompute == "auto" else model.recompute, config.batch))
        need = max(least.peak, least.validation) + CONTEXT_BYTES
        console.print(
            f"\nNothing fits: one sequence at a time takes {need / GIB:.1f} GiB of the GPU, "
            f"beside {MARGIN:.0%} that stay free"
            + (f", and, with the inputs of all blocks, {least.host / GIB:.1f} GiB of the host." if least.host else "."),
            highlight=False,
            soft_wrap=True,
        )
        plan = nearest_plan(_changed(config, "auto", config.accumulate), memory, host)
        if plan is None:
            size = given or f"{memory / 1e9:.1f}GB"
            raise ValueError(
                f"plan: gpu_memory = {size!r} is too small for {preset}, with shorter contexts, too: use a smaller network"
            )
        console.print(f"The nearest that fits has a context of {plan.config.model.context:,}:", highlight=False)
        config = replace(plan.config, model=replace(plan.config.model, recompute="auto"))
    console.print(_table(config, memory, host, plan))
    parts = {name: getattr(plan.memory, name) / GIB for name in ("weights", "states", "gradients", "kept", "working")}
    console.print(
        f"Chosen: {plan.config.batch // plan.config.accumulate:,} at a time. More parts are chosen only where that saves "
        f"{1 - WORTHWHILE:.0%} of the estimated time. The peak is in {plan.memory.phase}, in GiB: "
        + ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
        + f"; the CUDA context takes {CONTEXT_BYTES / GIB:.1f} more.",
        highlight=False,
    )
    most = largest_batch(config, memory, host)
    if most is not None:
        console.print(
            f"Most sequences at a time: {most.config.batch:,}, with recompute {most.config.model.recompute}.",
            highlight=False,
        )
    console.print(
        f"Times are estimated for an H200, {'with' if config.compile else 'without'} --compile, with errors of a fifth.",
        highlight=False,
    )
    console.print(f"\n{_command(preset, plan, given or f'{memory / 1e9:g}GB')}", highlight=False, soft_wrap=True)


def _own_memory() -> int:
    if not torch.cuda.is_available():
        raise ValueError("plan: there is no GPU here; give --gpu-memory, such as --gpu-memory 16GB")
    return int(torch.cuda.get_device_properties(0).total_memory)


def _changed(config: TrainConfig, recompute: str, accumulate: int) -> TrainConfig:
    return replace(config, accumulate=accumulate, model=replace(config.model, recompute=recompute))


def _table(config: TrainConfig, memory: int, host: int, chosen: Plan) -> Table:
    """One row for each way to divide the batch, the most sequences at a time first; that of the plan is marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("at a time", "accumulate", "recompute", "GPU GiB", "host GiB", "s/step", "bytes/s", ""):
        table.add_column(name, justify="left" if name == "recompute" else "right", overflow="fold")
    rows = 0
    for accumulate in accumulations(config, 1):
        plan = recomputation_plan(replace(config, accumulate=accumulate), memory, host)
        is_chosen = accumulate == chosen.config.accumulate
        if plan is None or (rows >= MOST_ROWS and not is_chosen):
            continue
        rows += 1
        table.add_row(
            str(config.batch // accumulate),
            str(accumulate),
            plan.config.model.recompute,
            f"{plan.memory.peak / GIB:.1f}",
            f"{plan.memory.host / GIB:.1f}",
            f"{plan.seconds:.3g}",
            f"{config.batch * config.model.context / plan.seconds:,.0f}",
            "chosen" if is_chosen else "",
        )
    # Wrapped at spaces: "27*selective" and "+ 3*off" are read as they are, "27*selectiv" and "e + 3*off" are not.
    recompute = table.columns[2]
    recompute.min_width = max((len(word) for cell in recompute.cells for word in str(cell).split()), default=0)
    return table


def _command(preset: str, plan: Plan, memory: str) -> str:
    """The command that trains as planned."""
    chosen, start = plan.config, train_preset(preset)
    words = ["longstride", "train", preset, "--data", "DATA", "--out", "RUN", "--gpu-memory", memory]
    for name in ("context", "pattern", "embedding"):
        if getattr(chosen.model, name) != getattr(start.model, name):
            words += [f"--model.{name}", str(getattr(chosen.model, name))]
    words += ["--model.recompute", chosen.model.recompute]  # Without it, --gpu-memory means "auto".
    for name in ("batch", "accumulate"):
        if getattr(chosen, name) != getattr(start, name):
            words += [f"--{name}", str(getattr(chosen, name))]
    if chosen.compile:
        words.append("--compile")
    if chosen.optimizer.name != start.optimizer.name:
        words += ["--optimizer.name", chosen.optimizer.name]
    return shlex.join(words)
