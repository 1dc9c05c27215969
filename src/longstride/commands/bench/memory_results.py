"""Results of `longstride bench memory`: rows, the tables that it prints, and reading them from a file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from longstride.commands.bench.records import read_list, read_machine, read_record
from longstride.commands.bench.report import print_lines, print_machine, print_table
from longstride.common.files import read_json

PAPER = {65_536: 152_000_000, 262_144: 25_000_000, 1_048_576: 3_000_000}
"""Parameters of the largest network that the paper's table 4 has at each length, in 16 GB."""


@dataclass(frozen=True)
class MemoryRow:
    """Training at one context. None where something was not measured, or training failed."""

    context: int
    parameters: int
    recompute: str | None = None
    """What each block recomputes."""
    predicted_gib: float | None = None
    """Predicted peak of tensors on the GPU."""
    measured_gib: float | None = None
    reserved_gib: float | None = None
    """Most memory that PyTorch held, fragments included, and without the CUDA context."""
    host_gib: float | None = None
    """Pinned memory of the host."""
    predicted_seconds: float | None = None
    """Predicted time of a step on an H200."""
    seconds: float | None = None
    """Median time of the steps after the first, or after the one that is captured as a CUDA graph, if there is one."""
    step_seconds: list[float] = field(default_factory=list)
    """Time of each step. The first compiles kernels and pins memory."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step, in nats."""
    failure: str | None = None

    @property
    def error(self) -> float | None:
        """Measured over predicted peak, less 1."""
        measured, predicted = self.measured_gib, self.predicted_gib
        return None if measured is None or not predicted else measured / predicted - 1


@dataclass(frozen=True)
class MemoryResult:
    machine: dict[str, str | int]
    settings: dict[str, Any]
    limit_gib: float
    """Memory that the process might take of the GPU."""
    rows: list[MemoryRow] = field(default_factory=list)


def read_memory(path: Path) -> MemoryResult:
    """Reads a file of `longstride bench memory --json`."""
    content = read_json(path)
    try:
        return MemoryResult(
            machine=read_machine(content.get("machine")),
            settings=dict(content.get("settings") or {}),
            limit_gib=float(content["limit_gib"]),
            rows=[read_record(MemoryRow, row) for row in read_list(content.get("rows"))],
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"bench memory: read = {str(path)!r} is no file of bench memory --json: {reason}") from None


HEADINGS = ("params\nmillion", "paper", "predicted\nGiB", "meas-\nured", "error", "host\nGiB", "seconds\na step", "first")


def show_memory(result: MemoryResult, console: Console) -> None:
    print_machine(console, result.machine, f"limit {result.limit_gib:.1f} GiB of the GPU")
    print_table(console, "steps in limited memory, and table 4", ("context",), HEADINGS, map(_cells, result.rows))
    print_lines(console, [line for row in result.rows for line in row_lines(row)])


def step_line(row: MemoryRow) -> str:
    """The newest step of a row, or its plan if there is none."""
    if not row.losses:
        return f"{row.context:,}: recompute {row.recompute}, predicted peak {row.predicted_gib:.2f} GiB"
    peak = "" if row.measured_gib is None else f", peak {row.measured_gib:.2f} GiB"
    return f"{row.context:,}: step {len(row.losses)}, loss {row.losses[-1]:.3f}, {row.step_seconds[-1]:.2f} s{peak}"


def row_lines(row: MemoryRow) -> list[str]:
    """What the table does not have."""
    lines = []
    if row.recompute is not None:
        lines.append(f"{row.context:,}: recompute {row.recompute}")
    if row.losses:
        lines.append(f"{row.context:,}: losses {', '.join(f'{loss:.3f}' for loss in row.losses)}")
    if row.step_seconds:
        lines.append(f"{row.context:,}: seconds {', '.join(f'{seconds:.2f}' for seconds in row.step_seconds)}")
    if row.failure is not None:
        lines.append(f"{row.context:,} did not run: {row.failure}")
    return lines


def _cells(row: MemoryRow) -> list[str]:
    paper = PAPER.get(row.context)
    return [
        f"{row.context:,}",
        f"{row.parameters / 1e6:.1f}",
        "-" if paper is None else f"{paper / 1e6:.0f}",
        *(_number(value, 2) for value in (row.predicted_gib, row.measured_gib)),
        "-" if row.error is None else f"{row.error:+.0%}",
        _number(row.host_gib, 1),
        _number(row.seconds, 2),
        _number(row.step_seconds[0] if row.step_seconds else None, 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
