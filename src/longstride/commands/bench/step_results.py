"""Results of `longstride bench step`: rows, the tables that it prints, and reading them from a file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from longstride.commands.bench.measure import Ceilings
from longstride.commands.bench.records import read_list, read_machine, read_record
from longstride.commands.bench.report import print_lines, print_machine, print_table
from longstride.common.files import read_json

PLAIN_DENSE, PLAIN_NONE = "plain, dense", "plain, no attention"
"""The network in plain PyTorch."""


@dataclass(frozen=True)
class StepRow:
    """Training steps of one network. None where something was not measured, or the network failed."""

    name: str
    """The case, or that of a peer."""
    network: str
    """What rows that are compared with each other share."""
    pattern: str
    batch: int
    context: int
    parameters: int
    plain_ms: float | None = None
    """Milliseconds of a step, launched kernel by kernel; on a CPU, of a step."""
    captured_ms: float | None = None
    """The same as one CUDA graph."""
    bytes_per_second: float | None = None
    """Of the faster of the two."""
    matrix_share: float | None = None
    """Flops of the network, without recomputation, at that speed, over the rate of a large matrix product."""
    host_share: float | None = None
    """Share of a step's time, launched kernel by kernel, that the CUDA graph saves: the GPU waits for the host."""
    plain_gib: float | None = None
    """Peak memory of tensors, launched kernel by kernel."""
    captured_gib: float | None = None
    first_step_seconds: float | None = None
    """The first step, which compiles."""
    last_loss: float | None = None
    """Of the last step, in nats."""
    plain_because: str | None = None
    """Why steps were not captured."""
    failure: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.name not in (PLAIN_DENSE, PLAIN_NONE)

    @property
    def milliseconds(self) -> float | None:
        """Of the faster way."""
        times = [one for one in (self.plain_ms, self.captured_ms) if one is not None]
        return min(times, default=None)


@dataclass(frozen=True)
class StepResult:
    machine: dict[str, str | int]
    settings: dict[str, Any]
    ceilings: Ceilings
    rows: list[StepRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Peers that were not measured, with the reason."""


def read_steps(path: Path) -> StepResult:
    """Reads a file of `longstride bench step --json`."""
    content = read_json(path)
    try:
        return StepResult(
            machine=read_machine(content.get("machine")),
            settings=dict(content.get("settings") or {}),
            ceilings=read_record(Ceilings, content.get("ceilings")),
            rows=[read_record(StepRow, row) for row in read_list(content.get("rows"))],
            left_out=[str(reason) for reason in read_list(content.get("left_out", []))],
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"bench step: read = {str(path)!r} is no file of bench step --json: {error}") from None


HEADINGS = ("single\nkernels", "one\ngraph", "MB/s", "matrix\nrate", "host", "GiB", "first\nstep")


def show_steps(result: StepResult, console: Console) -> None:
    print_machine(console, result.machine, f"matrix product {result.ceilings.flops_per_second / 1e12:.3g} TFLOP/s")
    for network in dict.fromkeys(row.network for row in result.rows):
        rows = [row for row in result.rows if row.network == network]
        first = rows[0]
        size = f"{first.batch} x {first.context:,} bytes, {first.parameters / 1e6:.1f} million parameters"
        print_table(console, f"{network}: {size}; milliseconds a step", ("",), HEADINGS, map(_cells, rows))
    notes = [f"left out: {reason}" for reason in result.left_out]
    notes += [f"{row.name} of {row.network} did not run: {row.failure}" for row in result.rows if row.failure]
    print_lines(console, [*notes, *comparisons(result.rows)])


def row_line(row: StepRow) -> str:
    """A row as it is measured, before the table."""
    if row.failure is not None or row.milliseconds is None:
        return f"{row.network}, {row.name}: {row.failure}"
    first = "" if row.first_step_seconds is None else f", the first {row.first_step_seconds:.1f} s"
    return f"{row.network}, {row.name}: {row.milliseconds:,.1f} ms a step{first}"


def comparisons(rows: list[StepRow]) -> list[str]:
    """A line for each of ours with its speed against the plain network, dense and without attention."""
    lines = []
    for row in rows:
        peers = {other.name: other.milliseconds for other in rows if other.network == row.network and not other.is_ours}
        own = row.milliseconds
        if not row.is_ours or own is None:
            continue
        texts = [f"{time / own:.2f} times as fast as {name}" for name, time in peers.items() if time is not None]
        if texts:
            lines.append(f"{row.name}: {'; '.join(texts)}")
    return lines


def _cells(row: StepRow) -> list[str]:
    memory = row.plain_gib if row.captured_gib is None else row.captured_gib
    return [
        row.name,
        _number(row.plain_ms, 1),
        _number(row.captured_ms, 1),
        _number(row.bytes_per_second, 3, 1e-6),
        "-" if row.matrix_share is None else f"{row.matrix_share:.1%}",
        "-" if row.host_share is None else f"{row.host_share:.0%}",
        _number(memory, 1),
        "-" if row.first_step_seconds is None else f"{row.first_step_seconds:,.1f} s",
    ]


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"
