"""Training at long contexts in a given memory: predicted and measured peaks, times and losses, as in the paper's table 4.

longstride bench memory --gpu-memory 16GB --json result.json --picture memory.png
longstride bench memory --gpu-memory 24GB --preset enwik8 --contexts 131072 524288
"""

import gc
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from longstride.commands.bench.memory_cases import check_memory_settings
from longstride.commands.bench.memory_results import MemoryResult, MemoryRow, read_memory, show_memory, step_line
from longstride.commands.bench.report import plain, print_lines, reason_of, save
from longstride.commands.bench.settings import MemoryBenchmark
from longstride.common.checks import size_in_bytes
from longstride.common.device import GIB, choose_device, describe_machine
from longstride.data import samples
from longstride.data.store import write_store
from longstride.training.budget import available_memory, memory_limit
from longstride.training.capture import PLAIN_STEPS, CapturedStep
from longstride.training.config import TrainConfig
from longstride.training.plan import Plan, make_plan
from longstride.training.trainer import Trainer

SEQUENCES = 3
"""Sequences of data at least, of which steps take random ones."""
Report = Callable[[MemoryRow], object]
"""Called with what is known of a context: first the plan, then after each step."""


def run(settings: MemoryBenchmark, console: Console | None = None) -> MemoryResult:
    """Trains at each context, prints tables, and writes JSON if asked to."""
    console = console or Console()
    if settings.read is not None:
        check_memory_settings(settings)
        result = read_memory(settings.read)
        save(result, settings.json)
        show_memory(result, console)
        return result
    device = choose_device("bench memory", settings.device)
    configs = [replace(one, device=str(device)) for one in check_memory_settings(settings, device.type == "cuda")]
    given = samples.text() if settings.data is None else np.fromfile(settings.data, np.uint8)
    if not len(given):
        raise ValueError(f"bench memory: data = {str(settings.data)!r} has no bytes")
    limit = size_in_bytes("bench memory", "gpu_memory", settings.gpu_memory)
    result = MemoryResult(describe_machine(device), plain(settings), round(limit / GIB, 3))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(configs) * settings.steps)

        def report(row: MemoryRow) -> None:
            result.rows[-1] = row
            save(result, settings.json)  # After each step: the next may take too long.
            print_lines(progress.console, [step_line(row)])
            progress.advance(task, 1 if row.losses else 0)

        for config in configs:
            progress.update(task, description=f"context {config.model.context:,}")
            result.rows.append(MemoryRow(config.model.context, config.model.parameters))
            failure = _train(settings, config, given, device, report)
            result.rows[-1] = replace(result.rows[-1], failure=failure)
            save(result, settings.json)
    show_memory(result, console)
    return result


def _train(
    settings: MemoryBenchmark, config: TrainConfig, given: NDArray[np.uint8], device: torch.device, report: Report
) -> str | None:
    """Trains at a context. Returns why it failed; None if it did not."""
    host = size_in_bytes("bench memory", "host_memory", settings.host_memory) if settings.host_memory else None
    plan = make_plan(config, available_memory(config, device), host)
    if plan is None:
        return "nothing fits; longstride plan says what is missing"
    row = MemoryRow(
        config.model.context,
        config.model.parameters,
        recompute=plan.config.model.recompute,
        predicted_gib=_rounded(plan.memory.peak / GIB),
        host_gib=_rounded(plan.memory.host / GIB),
        predicted_seconds=_rounded(plan.seconds),
    )
    report(row)
    try:
        with tempfile.TemporaryDirectory() as folder, memory_limit(config, device):
            _take_steps(row, plan, settings.steps, given, Path(folder), device, report)
    except (RuntimeError, MemoryError) as error:  # A lack of memory, or an error of CUDA.
        return reason_of(error)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _take_steps(
    row: MemoryRow, plan: Plan, steps: int, given: NDArray[np.uint8], folder: Path, device: torch.device, report: Report
) -> None:  # fmt: skip
    config, context = plan.config, plan.config.model.context
    stream = np.tile(given, -(-SEQUENCES * context // len(given)))
    write_store(folder / "data", "text", {"train": stream, "valid": stream[: 2 * context]})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    config = replace(config, data=str(folder / "data"), out=str(folder / "run"))
    times = []
    with closing(Trainer(config, resume=False, say=lambda line: None)) as trainer:
        for number in range(steps):
            batch = torch.from_numpy(trainer.training.batch(config.seed, number, config.batch)).to(device)
            begun = perf_counter()
            trainer.take_step(batch)
            trainer.finish_steps()
            times.append(perf_counter() - begun)
            captured = isinstance(trainer.compute, CapturedStep) and trainer.compute.graph is not None
            timed = times[PLAIN_STEPS + 1 :] if captured else times[1:]
            row = replace(
                row,
                **_peaks(device),
                seconds=_rounded(median(timed)) if timed else None,
                step_seconds=[_rounded(seconds) for seconds in times],
                losses=[_rounded(loss) for loss in trainer.run_state.losses],
            )
            report(row)


def _peaks(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    measured, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"measured_gib": _rounded(measured / GIB), "reserved_gib": _rounded(reserved / GIB)}


def _rounded(value: float) -> float:
    """Rounds to five significant digits."""
    return float(f"{value:.5g}")
