"""Results of `longstride bench attention`: rows, what follows from them, and reading them from a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longstride.commands.bench.checks import shape_name
from longstride.commands.bench.measure import Ceilings, exponent
from longstride.commands.bench.peers import PEERS, SDPA_DENSE
from longstride.commands.bench.records import read_list, read_machine, read_record
from longstride.common.files import read_json


@dataclass(frozen=True)
class CallerTimes:
    """Times of a call with its Python code; None where that was not measured, or the call failed."""

    forward_ms: float | None = None
    """Elapsed time as triton's do_bench measures it; on a CPU, wall time. Likewise below."""
    both_ms: float | None = None
    host_forward_us: float | None = None
    """Microseconds until a call returns, of calls back to back. Likewise below."""
    host_both_us: float | None = None

    @property
    def forward_wait_ms(self) -> float | None:
        """What a caller waits for, of calls back to back: the longer of elapsed and host time. Likewise below."""
        return longer(self.forward_ms, self.host_forward_us)

    @property
    def both_wait_ms(self) -> float | None:
        return longer(self.both_ms, self.host_both_us)


def longer(milliseconds: float | None, microseconds: float | None) -> float | None:
    """In milliseconds; do_bench clears a cache before each call, and the host may be done with the call by then."""
    return milliseconds and max(milliseconds, (microseconds or 0) / 1e3)


@dataclass(frozen=True)
class Row:
    """One contender at one shape. Times in milliseconds; None where it has no such direction or failed."""

    shape: str
    n: int
    name: str
    pattern: str
    pairs: int
    forward_ms: float | None = None
    """On a GPU, the time of its kernels alone. Likewise below."""
    both_ms: float | None = None
    peak_mib: float | None = None
    faster_than_dense: float | None = None
    """SDPA dense's `both_ms` over this one's."""
    forward_of_bytes: float | None = None
    """The time to move each tensor once at the rate of a copy, over the measured time; likewise below."""
    both_of_bytes: float | None = None
    forward_of_flops: float | None = None
    """The time of the pairs' products at the rate of a large matrix product, over the measured time; likewise below."""
    both_of_flops: float | None = None
    failure: str | None = None
    eager: CallerTimes | None = None
    """What a caller waits for. None on a CPU, where it is the time above, and in results of earlier versions."""
    compiled: CallerTimes | None = None
    """The same under torch.compile(fullgraph=True)."""

    @property
    def is_ours(self) -> bool:
        return not self.name.startswith(PEERS)


@dataclass(frozen=True)
class Growth:
    """The exponent a in time ~ pairs(n) ** a, and likewise for memory."""

    name: str
    time: float
    memory: float


@dataclass(frozen=True)
class Crossing:
    """From which measured n on one of ours is faster than SDPA dense; None if it is not at `longest`."""

    name: str
    time: str
    """A key of CLOCKS."""
    forward: int | None
    both: int | None
    longest: int
    """The largest n at which both were measured."""


@dataclass(frozen=True)
class Result:
    machine: dict[str, str | int]
    settings: dict[str, Any]
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Peers that cannot run on this machine, with the reason."""

    @property
    def on_gpu(self) -> bool:
        return "triton" in self.machine


CALLERS: dict[str, Callable[[Row], CallerTimes | None]] = {
    "caller": lambda row: row.eager,
    "compiled caller": lambda row: row.compiled,
}
CLOCKS = ("kernels", *CALLERS)
"""The times of a row. On a CPU only "kernels" has values: the time of a whole call."""


def milliseconds_of(row: Row, clock: str, direction: str) -> float | None:
    """The time of a direction, forward or both, by a clock."""
    if clock in CALLERS:
        return getattr(CALLERS[clock](row), f"{direction}_wait_ms", None)
    return getattr(row, f"{direction}_ms", None)


def growth(rows: Sequence[Row]) -> list[Growth]:
    """Of every contender with three lengths or more."""
    growths = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name and row.pairs and row.both_ms and row.peak_mib]
        if len(own) >= 3:
            pairs = [row.pairs for row in own]
            growths.append(
                Growth(
                    name,
                    time=round(exponent(pairs, [row.both_ms or 0 for row in own]), 3),
                    memory=round(exponent(pairs, [row.peak_mib or 0 for row in own]), 3),
                )
            )
    return growths


def crossings(rows: Sequence[Row]) -> list[Crossing]:
    """Of each of ours, by each clock, against the fastest SDPA dense of each n; none where both have one n alone."""
    crossings = []
    for name in dict.fromkeys(row.name for row in rows if row.is_ours):
        for clock in CLOCKS:
            forward, both = (_faster(rows, name, clock, direction) for direction in ("forward", "both"))
            lengths = forward.keys() | both.keys()
            if len(lengths) > 1:
                crossings.append(Crossing(name, clock, _from(forward), _from(both), max(lengths)))
    return crossings


def _faster(rows: Sequence[Row], name: str, clock: str, direction: str) -> dict[int, bool]:
    """By n: whether that contender is faster than SDPA dense."""
    ours: dict[int, float] = {}
    dense: dict[int, float] = {}
    for row in rows:
        milliseconds = milliseconds_of(row, clock, direction)
        if milliseconds and row.name == name:
            ours[row.n] = milliseconds
        elif milliseconds and row.name.startswith(SDPA_DENSE):
            dense[row.n] = min(milliseconds, dense.get(row.n, milliseconds))
    return {n: ours[n] < dense[n] for n in sorted(ours.keys() & dense.keys())}


def _from(faster: dict[int, bool]) -> int | None:
    """The first n after which, itself included, all are faster."""
    first = None
    for n in sorted(faster, reverse=True):
        if not faster[n]:
            break
        first = n
    return first


def is_by_length(rows: Sequence[Row]) -> bool:
    """Whether rows differ in n alone, as growth and crossings need it, and not in batch, heads and pattern too."""
    return all(row.shape == shape_name(row.n) for row in rows)


def conclude(result: Result) -> None:
    """Computes growth and crossings from the rows, if they differ only in n."""
    if is_by_length(result.rows):
        result.growth[:] = growth(result.rows)
        result.crossings[:] = crossings(result.rows)


def read_result(path: Path) -> Result:
    """Reads a file of `longstride bench attention --json`, of this version or an earlier one."""
    content = read_json(path)
    try:
        result = Result(
            machine=read_machine(content.get("machine")),
            settings=dict(content.get("settings") or {}),
            ceilings=read_record(Ceilings, content.get("ceilings")),
            rows=[read_record(Row, row) for row in read_list(content.get("rows"))],
            left_out=[str(reason) for reason in read_list(content.get("left_out", []))],
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"bench attention: read = {str(path)!r} is no file of bench attention --json: {error}") from None
    conclude(result)
    return result
