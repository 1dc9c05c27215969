"""Our patterns beside what one would use instead: SDPA dense and FlexAttention with the same pattern.

longstride bench attention --lengths 4096 16384 --patterns 'merged(strided(128))' --json result.json
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from longstride.atomic import atomic_path, writable
from longstride.attention import attend
from longstride.attention.api import choose
from longstride.benchmarks.measure import exponent, keep_freed_memory, machine, peak_bytes, seconds_each
from longstride.notation import parse
from longstride.patterns import Dense, Pattern


@dataclass(frozen=True)
class AttentionBenchmark:
    """Time and memory of attention. Example: longstride bench attention --lengths 4096 16384 --heads 4"""

    lengths: tuple[int, ...] = (16_384,)
    """Sequence lengths; three or more also give how time and memory grow with pairs(n)."""
    patterns: tuple[str, ...] = (
        "merged(strided(128))",
        "merged(fixed(128, 32))",
        "local(128)",
        "column(128)",
        "block(128)",
    )
    """Patterns as text, one for all heads."""
    peers: Literal["all", "sdpa", "none"] = "all"
    """What to measure beside ours: SDPA dense and FlexAttention, SDPA alone, or nothing."""
    batch: int = 1
    heads: int = 1
    d_qk: int = 64
    d_v: int = 64
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    impl: str = "auto"
    """Which implementation of ours."""
    repeats: int = 5
    """Rounds, in which all take turns; the median counts."""
    json: Path | None = None
    """Where to keep the results."""


@dataclass(frozen=True)
class Row:
    """One contender at one length. Times in milliseconds; None where it has no such direction or failed."""

    n: int
    name: str
    pattern: str
    pairs: int
    forward_ms: float | None = None
    both_ms: float | None = None
    peak_mib: float | None = None
    faster_than_dense: float | None = None
    """How many times as fast as SDPA dense in the same run, forward and backward."""
    failure: str | None = None


@dataclass(frozen=True)
class Contender:
    name: str
    pattern: Pattern
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    peer: bool
    differentiable: bool = True


@dataclass(frozen=True)
class Growth:
    """The exponent a in time ~ pairs(n) ** a, and likewise for memory."""

    name: str
    time: float
    memory: float


@dataclass(frozen=True)
class Result:
    machine: dict[str, str | int]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)


def run(settings: AttentionBenchmark, console: Console | None = None) -> Result:
    """Measures, prints a table, and writes JSON where that is asked for."""
    patterns = _check(settings)
    console = console or Console()
    device = torch.device(settings.device)
    keep_freed_memory()
    result = Result(machine(device), _plain(settings))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(settings.lengths))
        for n in settings.lengths:
            progress.update(task, description=f"n = {n:,}")
            result.rows.extend(_measure_length(settings, patterns, n, device))
            progress.advance(task)
    if len(settings.lengths) >= 3:
        result.growth.extend(_growth(result.rows))
    _print(result, console)
    if settings.json is not None:
        with atomic_path(settings.json) as path:
            path.write_text(json.dumps(_plain(result), indent=2) + "\n")
    return result


def _check(settings: AttentionBenchmark) -> list[tuple[str, Pattern]]:
    """The patterns by their text, after everything that could be wrong has been looked at."""
    for name in ("batch", "heads", "d_qk", "d_v", "repeats"):
        if getattr(settings, name) < 1:
            raise ValueError(f"bench attention: {name} must be at least 1, got {getattr(settings, name)}")
    for name in ("lengths", "patterns"):
        given = getattr(settings, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"bench attention: {name} must be one or more different ones, got {list(given)}")
    for n in settings.lengths:
        if n < 1:
            raise ValueError(f"bench attention: lengths must be at least 1, got {n}")
    try:
        torch.ones(1, device=settings.device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"bench attention: device = {settings.device!r} cannot be used: {reason}") from None
    patterns = []
    for text in settings.patterns:
        heads = parse(text)
        if len(heads) != 1:
            raise ValueError(
                f"bench attention: patterns has {text!r}, which is {len(heads)} heads; write 'merged({text})' for one head "
                "that sees what they see"
            )
        patterns.append((text, heads[0]))
    try:
        choose(settings.impl, torch.device(settings.device))
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if settings.json is not None:
        writable("bench attention", "json", settings.json)
    return patterns


def _measure_length(
    settings: AttentionBenchmark, patterns: Sequence[tuple[str, Pattern]], n: int, device: torch.device
) -> list[Row]:
    shape, dtype = (settings.batch, settings.heads, n), getattr(torch, settings.dtype)
    q, k, v, slopes = (
        torch.randn(*shape, d, dtype=dtype, device=device)
        for d in (settings.d_qk, settings.d_qk, settings.d_v, settings.d_v)
    )
    contenders = _contenders(settings, patterns, n, device)
    failures: dict[str, str] = {}
    for contender in (one for one in contenders if one.peer):
        try:  # A peer may not run here at all: FlexAttention wants a C++ compiler, for one.
            contender.call(q, k, v)
        except Exception as error:
            failures[contender.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    able = [contender for contender in contenders if contender.name not in failures]

    def forward(contender: Contender) -> Callable[[], Any]:
        return lambda: contender.call(q, k, v)

    def both(contender: Contender) -> Callable[[], Any]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(contender.call(*inputs), inputs, slopes)

    forward_times = seconds_each({one.name: forward(one) for one in able}, settings.repeats, device)
    trained = {one.name: both(one) for one in able if one.differentiable}
    both_times = seconds_each(trained, settings.repeats, device)
    peaks = {name: peak_bytes(call, device) for name, call in trained.items()}
    dense = both_times.get("SDPA dense")
    rows = []
    for one in contenders:
        both_time = both_times.get(one.name)
        rows.append(
            Row(
                n=n,
                name=one.name,
                pattern=repr(one.pattern),
                pairs=one.pattern.pairs(n),
                forward_ms=_rounded(forward_times.get(one.name), 1e3),
                both_ms=_rounded(both_time, 1e3),
                peak_mib=_rounded(peaks.get(one.name), 2**-20),
                faster_than_dense=_rounded(dense / both_time) if dense and both_time else None,
                failure=failures.get(one.name),
            )
        )
    return rows


def _contenders(
    settings: AttentionBenchmark, patterns: Sequence[tuple[str, Pattern]], n: int, device: torch.device
) -> list[Contender]:
    contenders = []
    if settings.peers != "none":
        contenders.append(Contender("SDPA dense", Dense(), _sdpa, peer=True))
    for text, pattern in patterns:
        contenders.append(Contender(text, pattern, _ours(pattern, settings.impl), peer=False))
        if settings.peers == "all":
            flex = _flex(pattern, n, device)  # It has no backward on a CPU.
            contenders.append(Contender(f"Flex {text}", pattern, flex, peer=True, differentiable=device.type != "cpu"))
    return contenders


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _ours(pattern: Pattern, impl: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(q, k, v, pattern, impl=impl)


def _flex(pattern: Pattern, n: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the pattern as its mask, compiled, as its users are told to call it."""
    compiled: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Each pattern and length is compiled for itself; the default stops that after eight.
        with torch._dynamo.config.patch(recompile_limit=256):
            if not compiled:
                make = torch.compile(create_block_mask)
                mask = make(lambda b, h, i, j: pattern.sees(i, j), None, None, n, n, device=device)
                compiled.extend((torch.compile(flex_attention, dynamic=False), mask))
            output: Tensor = compiled[0](q, k, v, block_mask=compiled[1])
            return output

    return call


def _growth(rows: Sequence[Row]) -> list[Growth]:
    growth = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name and row.pairs and row.both_ms and row.peak_mib]
        if len(own) >= 3:
            pairs = [row.pairs for row in own]
            growth.append(
                Growth(
                    name,
                    time=round(exponent(pairs, [row.both_ms or 0 for row in own]), 3),
                    memory=round(exponent(pairs, [row.peak_mib or 0 for row in own]), 3),
                )
            )
    return growth


def _print(result: Result, console: Console) -> None:
    about = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    console.print(about, highlight=False)
    for n in dict.fromkeys(row.n for row in result.rows):
        table = Table(title=f"n = {n:,}", title_justify="left", title_style="bold")
        table.add_column("attention", no_wrap=True)
        for heading in ("million\npairs", "forward\nms", "with\nbackward", "peak\nMiB", "dense\n/ this"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in (row for row in result.rows if row.n == n):
            measured = (row.forward_ms, row.both_ms, row.peak_mib, row.faster_than_dense)
            table.add_row(row.name, f"{row.pairs / 1e6:,.2f}", *(_cell(value) for value in measured))
        console.print(table)
    notes = [f"{row.name} at n = {row.n:,} did not run: {row.failure}" for row in result.rows if row.failure]
    notes += [f"{one.name}: time ~ pairs^{one.time}, memory ~ pairs^{one.memory}" for one in result.growth]
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _rounded(value: float | None, factor: float = 1) -> float | None:
    return None if value is None else round(value * factor, 3)


def _plain(value: Any) -> Any:
    """Dataclasses as dicts and paths as text, for JSON."""
    return json.loads(json.dumps(asdict(value), default=str))
