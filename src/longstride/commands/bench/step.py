"""Training steps of whole networks, kernel by kernel and as a CUDA graph, beside the same networks in plain PyTorch.

longstride bench step --json result.json --picture steps.png
longstride bench step --cases 'enwik8 optimizer=muon' 'enwik8 dropout=0.4 recompute=on' --peers none
"""

import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from longstride.commands.bench import step_peers
from longstride.commands.bench.measure import ceilings
from longstride.commands.bench.report import plain, print_lines, reason_of, save
from longstride.commands.bench.settings import StepBenchmark
from longstride.commands.bench.step_cases import Case, check_step
from longstride.commands.bench.step_results import (
    PLAIN_DENSE,
    PLAIN_NONE,
    StepResult,
    StepRow,
    read_steps,
    row_line,
    show_steps,
)
from longstride.common.device import GIB, choose_device, describe_machine, keep_freed_memory
from longstride.data.store import write_store
from longstride.model import ModelConfig
from longstride.model.cost import attention_flops, step_flops
from longstride.training.capture import CapturedStep
from longstride.training.config import TrainConfig
from longstride.training.trainer import Trainer

WARM_UP = 3
"""Steps before the first round, the first step included."""
NEVER = 10**9
BATCHES = 4
"""Batches that steps take in turns."""


class Training(Protocol):
    """Something that takes training steps: a run of ours, or a plain network."""

    plain_because: str
    """Why steps cannot be captured; empty if they can."""

    @property
    def captured(self) -> CapturedStep | None: ...
    def take_step(self, number: int) -> None: ...
    def finish(self) -> float:
        """Waits for the steps that have been started, and returns the loss of the last."""

    def close(self) -> None: ...


class Ours:
    """Steps of `longstride train` on random bytes."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = config.model.positions.sizes
        kind, item = ("images", sizes) if len(sizes) == 3 else ("text", ())
        context, random = config.model.context, np.random.default_rng(0)
        splits = {"train": context * max(64, config.batch), "valid": context * 4}
        write_store(folder / "data", kind, {name: random.integers(0, 256, n, np.uint8) for name, n in splits.items()}, item)
        config = replace(config, data=str(folder / "data"), out=str(folder / "run"), device=str(device))
        self.trainer = Trainer(config, resume=False, say=self._note)
        self.stack.callback(self.trainer.close)
        self.plain_because = self.trainer.plain_because or ""
        compute = self.trainer.compute
        self.captured = compute if isinstance(compute, CapturedStep) else None
        batch = partial(self.trainer.training.batch, config.seed)
        self.batches = [torch.from_numpy(batch(number, config.batch)).to(device) for number in range(BATCHES)]

    def take_step(self, number: int) -> None:
        self.trainer.take_step(self.batches[number % BATCHES])

    def finish(self) -> float:
        self.trainer.finish_steps()
        return float(self.trainer.run_state.losses[-1])

    def close(self) -> None:
        self.stack.close()

    def _note(self, line: str) -> None:
        self.plain_because = line


def run(settings: StepBenchmark, console: Console | None = None) -> StepResult:
    """Measures, prints tables, and writes JSON if asked to."""
    console = console or Console()
    if settings.read is not None:
        check_step(settings)
        result = read_steps(settings.read)
        save(result, settings.json)
        show_steps(result, console)
        return result
    device = choose_device("bench step", settings.device)
    cases = check_step(settings, device.type == "cuda")
    keep_freed_memory()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result = StepResult(describe_machine(device), plain(settings), ceilings(dtype, device))
    contenders = list(_contenders(settings, cases, device, result.left_out))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(contenders))
        for row, config, make in contenders:
            progress.update(task, description=f"{row.network}: {row.name}")
            result.rows.append(_measure(settings, row, config, make, result.ceilings.flops_per_second, device))
            save(result, settings.json)  # As they come: the next may take too long, or too much memory.
            print_lines(progress.console, [row_line(result.rows[-1])])
            progress.advance(task)
    show_steps(result, console)
    return result


Contender = tuple[StepRow, TrainConfig, Callable[[], Training]]


def _contenders(
    settings: StepBenchmark, cases: list[Case], device: torch.device, left_out: list[str]
) -> list[Contender]:  # fmt: skip
    """Returns ours, then their peers, then dense ones of ours, which take the longest."""
    sparse: list[Contender] = []
    dense_ones: list[Contender] = []
    for case in cases:
        kind = dense_ones if case.config.model.pattern == "dense()" else sparse
        kind.append((_row(case, case.text), case.config, partial(Ours, case.config, device)))
    peers: list[Contender] = []
    for network in dict.fromkeys(case.network for case in cases if settings.peers == "all"):
        own = [case for case in cases if case.network == network]
        dense = replace(own[0], config=replace(own[0].config, model=replace(own[0].config.model, pattern="dense()")))
        reason = step_peers.missing(dense.config.model)
        if reason is not None:
            left_out.append(f"plain PyTorch for {network}: {reason}")
            continue
        for name in (PLAIN_DENSE, PLAIN_NONE):
            make = partial(step_peers.PlainTraining, dense.config, device, name == PLAIN_DENSE)
            peers.append((_row(dense, name), dense.config, make))
    return sparse + peers + dense_ones


def _row(case: Case, name: str) -> StepRow:
    config, model = case.config, case.config.model
    pattern = "" if name == PLAIN_NONE else model.pattern
    return StepRow(name, case.network, pattern, config.batch, model.context, model.parameters)


def model_flops(model: ModelConfig, has_attention: bool) -> int:
    """Flops of a training step for one sequence, without recomputation."""
    return step_flops(replace(model, recompute="off")) - (0 if has_attention else attention_flops(model))


def _measure(
    settings: StepBenchmark, row: StepRow, config: TrainConfig, make: Callable[[], Training], rate: float,
    device: torch.device,
) -> StepRow:  # fmt: skip
    try:
        with ExitStack() as stack:
            training = make()
            stack.callback(training.close)
            measured = _time(settings, training, device)
    except Exception as error:
        # Ours may lack memory, or CUDA may fail; other errors of ours are our mistakes. A peer may fail in any way.
        if row.is_ours and not isinstance(error, RuntimeError | MemoryError):
            raise
        return replace(row, failure=reason_of(error))
    finally:
        training = None  # type: ignore[assignment]
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    done = replace(row, **measured)
    assert done.milliseconds is not None
    seconds = done.milliseconds / 1e3
    flops = config.batch * model_flops(config.model, bool(row.pattern))
    host = None if done.captured_ms is None or done.plain_ms is None else max(0.0, 1 - done.captured_ms / done.plain_ms)
    speed = config.batch * config.model.context / seconds
    return replace(
        done, bytes_per_second=_rounded(speed), matrix_share=_rounded(flops / seconds / rate), host_share=_rounded(host)
    )


def _time(settings: StepBenchmark, training: Training, device: torch.device) -> dict[str, Any]:
    """Returns the measured fields of a row."""
    captured = training.captured
    if captured is not None:
        captured.plain_steps = NEVER
    _reset_peak(device)
    begun = perf_counter()
    training.take_step(0)
    training.finish()
    measured: dict[str, Any] = {"first_step_seconds": _rounded(perf_counter() - begun)}
    measured["plain_ms"] = _milliseconds(settings, training, WARM_UP - 1)
    measured["plain_gib"] = _peak_gib(device)
    if captured is not None:
        captured.plain_steps = 0
        _reset_peak(device)
        milliseconds = _milliseconds(settings, training, WARM_UP - 1)
        if captured.graph is not None:
            measured |= {"captured_ms": milliseconds, "captured_gib": _peak_gib(device)}
    if "captured_ms" not in measured:
        measured["plain_because"] = training.plain_because or None
    measured["last_loss"] = _rounded(training.finish())
    return measured


def _milliseconds(settings: StepBenchmark, training: Training, warm_up: int) -> float:
    """Milliseconds of a step, as the median of the rounds."""
    times = []
    for steps in (warm_up, *[settings.steps] * settings.rounds):
        begun = perf_counter()
        for number in range(steps):
            training.take_step(number)
        training.finish()
        times.append((perf_counter() - begun) / steps)
    return float(f"{1e3 * median(times[1:]):.6g}")


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: torch.device) -> float | None:
    return _rounded(torch.cuda.max_memory_allocated(device) / GIB) if device.type == "cuda" else None


def _rounded(value: float | None) -> float | None:
    """Rounds to five significant digits."""
    return None if value is None else float(f"{value:.5g}")
