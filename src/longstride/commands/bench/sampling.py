"""Time to sample a byte at given positions, beside alternatives and beside the floor that memory bandwidth sets.

longstride bench sampling --preset enwik8 --batches 1 64 --positions 200 12000 --json result.json --picture rates.png
longstride bench sampling --preset music-65536 --batches 1 --positions 0 --bytes 65536 --peers none
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from longstride.commands.bench.checks import check_sampling
from longstride.commands.bench.measure import Ceilings, ceilings
from longstride.commands.bench.report import (
    plain,
    print_lines,
    print_machine,
    print_table,
    reason_of,
    save,
)
from longstride.commands.bench.sampling_peers import (
    Contender,
    Timing,
    Transformers,
    Uncached,
    missing,
    transformers_version,
)
from longstride.commands.bench.settings import SamplingBenchmark
from longstride.common.console import with_noun
from longstride.common.device import choose_device, describe_machine, keep_freed_memory
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import cache_bytes, step_bytes
from longstride.sampling import generate
from longstride.sampling.streams import GPU_PIECE

OURS, UNCACHED, TRANSFORMERS = "longstride", "no cache", "transformers"


@dataclass(frozen=True)
class Row:
    """One contender, batch and position. None where it failed."""

    name: str
    batch: int
    position: int
    step_us: float | None = None
    """Microseconds for a byte of every stream."""
    bytes_per_second: float | None = None
    """All streams together."""
    floor_us: float | None = None
    """Time to read the weights and each stream's visible keys and values once, at the rate of a copy."""
    of_floor: float | None = None
    """The step's time over its floor: 1 is the best possible."""
    cache_mib: float | None = None
    """The cache of all streams, up to the last byte that was timed."""
    timed: int | None = None
    """Steps in each round."""
    failure: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.name == OURS


@dataclass(frozen=True)
class Result:
    machine: dict[str, str | int]
    settings: dict[str, Any]
    context: int
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass
class Task:
    """A contender at a position, with the timing of each round or the reason why there is none."""

    name: str
    contender: Contender
    prompts: Tensor
    steps: int
    timings: list[Timing] = field(default_factory=list)
    failure: str | None = None


class NothingTimedError(Exception):
    """Raised if there are too few bytes to time."""


class Ours:
    """`generate`, called as users call it."""

    def __init__(self, model: SparseTransformer) -> None:
        self.model = model

    def time(self, prompts: Tensor, steps: int) -> Timing:
        """Times the steps after the first bytes: the pass over the prompt is not timed."""
        position, streams = prompts.shape[1], [bytes(row) for row in prompts.tolist()]
        length = min(self.model.config.context - position, GPU_PIECE + steps)
        pieces = generate(self.model, streams, length)
        first, timed = len(next(pieces)[0]), 0
        begun = ended = perf_counter()
        for piece in pieces:
            ended = perf_counter()  # Before the generator ends, which frees a whole network.
            timed += len(piece[0])
            if timed >= steps:
                break
        if not timed:
            raise NothingTimedError(f"all {length} bytes came at once; give an earlier position, or more --bytes")
        return Timing((ended - begun) / timed, position + first, timed)

    def floor_bytes(self, batch: int, first: int, steps: int) -> float:
        return step_bytes(self.model.config, batch, first, steps)

    def cache_bytes(self, batch: int, length: int) -> int:
        return batch * cache_bytes(self.model.config, length)


def run(settings: SamplingBenchmark, console: Console | None = None) -> Result:
    """Measures, prints a table, and writes JSON if asked to."""
    config = check_sampling(settings)
    device = choose_device("bench sampling", settings.device)
    console = console or Console()
    keep_freed_memory()
    limits = ceilings(config.dtype, device)
    result = Result({**describe_machine(device), **transformers_version()}, plain(settings), config.context, limits)
    model = random_model(config, device)
    contenders: dict[str, Contender] = {OURS: Ours(model)}
    if settings.peers == "all":
        contenders[UNCACHED] = Uncached(model)
        reason = missing()
        if reason is None:
            contenders[TRANSFORMERS] = Transformers(model)
        else:
            result.left_out.append(reason)
    with Progress(console=console, transient=True) as progress:
        each = len(settings.positions) * len(contenders) * (settings.repeats + 1)
        bar = progress.add_task("measuring", total=len(settings.batches) * each)
        for batch in settings.batches:
            progress.update(bar, description=f"batch {batch}")
            tasks = []
            for position in settings.positions:
                steps = settings.bytes or (256 if device.type == "cuda" else 32)
                steps = min(steps, config.context - position - 1)
                prompts = torch.randint(256, (batch, position), dtype=torch.uint8, device=device)
                tasks += [Task(name, contender, prompts, steps) for name, contender in contenders.items()]
            take_turns(tasks, settings.repeats, lambda: progress.advance(bar))
            result.rows.extend(_row(task, limits) for task in tasks)
            save(result, settings.json)  # Not only at the end: the next batch may take too long or too much memory.
    show(result, console)
    return result


def random_model(config: ModelConfig, device: torch.device) -> SparseTransformer:
    """A network with random weights. The output weights, which start at 0 and make every byte as likely, are random, too."""
    torch.manual_seed(0)
    with torch.device(device):
        model = SparseTransformer(config)
    torch.nn.init.normal_(model.output.weight, std=config.width**-0.5)
    return model.eval()


def take_turns(tasks: Sequence[Task], repeats: int, report: Callable[[], object]) -> None:
    """Times all tasks in turns, so that slow phases of the machine affect all of them. `report` is called before each."""
    for number in range(repeats + 1):
        for task in tasks:
            report()
            if task.failure is not None:
                continue
            try:
                timing = task.contender.time(task.prompts, task.steps)
            except Exception as error:
                # Our sampling may lack memory or bytes; other errors are our mistakes. A peer may fail in any way.
                if task.name == OURS and not isinstance(error, torch.OutOfMemoryError | NothingTimedError):
                    raise
                task.failure = reason_of(error)
                if task.prompts.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                if number:  # The first round compiles kernels.
                    task.timings.append(timing)


def _row(task: Task, limits: Ceilings) -> Row:
    batch, position = task.prompts.shape
    if task.failure is not None:
        return Row(task.name, batch, position, failure=task.failure)
    seconds = median(timing.seconds for timing in task.timings)
    contender, (_, first, steps) = task.contender, task.timings[0]
    floor = contender.floor_bytes(batch, first, steps) / limits.bytes_per_second
    return Row(
        task.name,
        batch,
        position,
        step_us=_figures(seconds * 1e6),
        bytes_per_second=_figures(batch / seconds),
        floor_us=_figures(floor * 1e6),
        of_floor=_figures(seconds / floor),
        cache_mib=_figures(contender.cache_bytes(batch, first + steps) / 2**20),
        timed=steps,
    )


def _figures(value: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{value:.6g}")


def show(result: Result, console: Console) -> None:
    print_machine(console, result.machine, f"copy {result.ceilings.bytes_per_second / 1e12:.3f} TB/s")
    rows = [
        [
            row.name,
            f"{row.batch:,}",
            f"{row.position:,}",
            *map(_cell, (row.step_us, row.bytes_per_second, row.floor_us, row.of_floor, row.cache_mib)),
        ]
        for row in result.rows
    ]
    headings = ("streams", "position", "step\nus", "bytes/s", "floor\nus", "step\n/ floor", "cache\nMiB")
    print_table(console, result.settings["preset"], ("sampling",), headings, rows)
    print_lines(console, _notes(result))


def _notes(result: Result) -> list[str]:
    notes = [f"left out: {reason}" for reason in result.left_out]
    notes += [
        f"{row.name}, {with_noun(row.batch, 'stream')}, position {row.position:,} did not run: {row.failure}"
        for row in result.rows
        if row.failure
    ]
    ours = [row for row in result.rows if row.name == OURS and row.step_us]
    for batch in dict.fromkeys(row.batch for row in ours):
        notes.append(_summary([row for row in ours if row.batch == batch], result.context))
    return notes


def _summary(rows: Sequence[Row], context: int) -> str:
    """For one batch: how time grows with the position, and how long a whole context takes."""
    slowest = max(row.step_us or 0 for row in rows)
    text = f"{OURS}, {with_noun(rows[0].batch, 'stream')}: "
    if len(rows) > 1:
        first, last = min(rows, key=lambda row: row.position), max(rows, key=lambda row: row.position)
        growth = (last.step_us or 0) / (first.step_us or 1)
        text += f"position {last.position:,} takes {growth:.2f}x position {first.position:,}; "
    return text + f"the whole context, {context:,} bytes at the slowest rate above, takes {context * slowest / 1e6:,.1f} s"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
