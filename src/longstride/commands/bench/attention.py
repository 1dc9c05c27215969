"""Time and memory of our patterns and of alternatives, at any shape or at those of the paper's data sets.

longstride bench attention --lengths 4096 16384 --patterns 'merged(strided(128))' --json result.json
longstride bench attention --shapes enwik8 cifar10 --json result.json
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from longstride.attention import attend
from longstride.attention.api import choose
from longstride.commands.bench import peers
from longstride.commands.bench.measure import Ceilings, ceilings, exponent, keep_freed_memory, peak_bytes, seconds_each
from longstride.commands.bench.results import check_outputs, plain, save
from longstride.commands.bench.settings import AttentionBenchmark
from longstride.common.device import choose_device, describe_machine
from longstride.patterns import Dense, Pattern
from longstride.patterns.notation import parse

DENSE_LIMIT = 2**17
"""Above this length dense attention and FlexAttention's masks take too long or too much memory."""


@dataclass(frozen=True)
class Shape:
    """Sizes and patterns that are measured together. `name` is a data set of the paper, or the length."""

    name: str
    batch: int
    heads: int
    n: int
    d_qk: int
    d_v: int
    patterns: tuple[str, ...]


def _paper(name: str, batch: int, heads: int, n: int, d_qk: int, d_v: int, l: int, c: int) -> Shape:
    merged = (f"merged(strided({l}))", f"merged(fixed({l}, {c}))", f"merged(fixed({l}, 8))")
    return Shape(name, batch, heads, n, d_qk, d_v, (*dict.fromkeys(merged), f"local({l})", f"column({l})", f"block({l})"))


SHAPES = {
    shape.name: shape
    for shape in (
        _paper("enwik8", 8, 8, 12_288, 64, 64, l=128, c=32),
        _paper("imagenet64", 8, 16, 12_288, 32, 32, l=128, c=8),
        _paper("cifar10", 32, 2, 3_072, 64, 128, l=96, c=8),
        _paper("music-65536", 1, 16, 65_536, 32, 32, l=256, c=8),
        _paper("music-262144", 1, 8, 262_144, 32, 32, l=512, c=8),
        _paper("music-1048576", 1, 1, 1_048_576, 64, 64, l=1024, c=8),
    )
}


@dataclass(frozen=True)
class Row:
    """One contender at one shape. Times in milliseconds; None where it has no such direction or failed."""

    shape: str
    n: int
    name: str
    pattern: str
    pairs: int
    forward_ms: float | None = None
    both_ms: float | None = None
    peak_mib: float | None = None
    faster_than_dense: float | None = None
    """How many times as fast as SDPA dense in the same run, forward and backward."""
    forward_of_bytes: float | None = None
    """The time to move each tensor once at the rate of a copy, over the measured time; likewise below."""
    both_of_bytes: float | None = None
    forward_of_flops: float | None = None
    """The time of the pairs' products at the rate of a large matrix product, over the measured time; likewise below."""
    both_of_flops: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Contender:
    name: str
    pattern: Pattern
    call: peers.Attention
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
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)


def run(settings: AttentionBenchmark, console: Console | None = None) -> Result:
    """Measures, prints a table, and writes JSON if a path is given."""
    device = choose_device("bench attention", settings.device)
    shapes = _check(settings, device)
    console = console or Console()
    keep_freed_memory()
    dtype = _dtype(settings.dtype, device)
    limits = ceilings(dtype, device)
    result = Result(describe_machine(device), plain(settings), limits)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(shapes))
        for shape in shapes:
            progress.update(task, description=shape.name)
            result.rows.extend(_measure(settings, shape, dtype, device, limits))
            save(result, settings.json)  # Not only at the end: the next shape may take too long or too much memory.
            progress.advance(task)
    if not settings.shapes and len(settings.lengths) >= 3:
        result.growth.extend(_growth(result.rows))
        save(result, settings.json)
    _print(result, console)
    return result


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check(settings: AttentionBenchmark, device: torch.device) -> list[Shape]:
    """Validates the settings and returns the shapes to measure."""
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
    for text in settings.patterns:
        heads = parse(text)
        if len(heads) != 1:
            raise ValueError(
                f"bench attention: patterns has {text!r}, which is {len(heads)} heads; write 'merged({text})' for one head "
                "that sees what they see"
            )
    for shape in settings.shapes:
        if shape not in SHAPES:
            raise ValueError(f"bench attention: shapes has {shape!r}; the names are {', '.join(SHAPES)}")
    try:
        choose(settings.impl, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    check_outputs("bench attention", settings)
    if settings.shapes:
        return [SHAPES[name] for name in settings.shapes]
    return [
        Shape(f"n = {n:,}", settings.batch, settings.heads, n, settings.d_qk, settings.d_v, settings.patterns)
        for n in settings.lengths
    ]


def _measure(
    settings: AttentionBenchmark, shape: Shape, dtype: torch.dtype, device: torch.device, limits: Ceilings
) -> list[Row]:
    q, k, v, slopes = (
        torch.randn(shape.batch, shape.heads, shape.n, d, device=device).to(dtype)
        for d in (shape.d_qk, shape.d_qk, shape.d_v, shape.d_v)
    )
    contenders = _contenders(settings, shape, device)
    failures: dict[str, str] = {}
    for contender in (one for one in contenders if one.peer):
        try:  # A peer may not run here: FlexAttention, for example, needs a C++ compiler.
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
    # Forward moves q, k, v and the output; backward those, the output's gradient and three more.
    moved = (q.nbytes + v.nbytes) * 2 / limits.bytes_per_second
    rows = []
    for one in contenders:
        forward_time, both_time = forward_times.get(one.name), both_times.get(one.name)
        pairs = one.pattern.pairs(shape.n)
        # A product with the key and one with the value forward, and five more backward.
        products = [2 * shape.batch * shape.heads * pairs * d / limits.flops_per_second for d in (shape.d_qk, shape.d_v)]
        rows.append(
            Row(
                shape=shape.name,
                n=shape.n,
                name=one.name,
                pattern=repr(one.pattern),
                pairs=pairs,
                forward_ms=_rounded(forward_time, 1e3),
                both_ms=_rounded(both_time, 1e3),
                peak_mib=_rounded(peaks.get(one.name), 2**-20),
                faster_than_dense=_ratio(dense, both_time),
                forward_of_bytes=_ratio(moved, forward_time),
                both_of_bytes=_ratio(3 * moved, both_time),
                forward_of_flops=_ratio(sum(products), forward_time),
                both_of_flops=_ratio(4 * products[0] + 3 * products[1], both_time),
                failure=failures.get(one.name),
            )
        )
    return rows


def _contenders(settings: AttentionBenchmark, shape: Shape, device: torch.device) -> list[Contender]:
    contenders = []
    if settings.peers != "none" and shape.n <= DENSE_LIMIT:
        contenders += [Contender(name, Dense(), call, peer=True) for name, call in peers.dense(device).items()]
    for text in shape.patterns:
        (pattern,) = parse(text)
        contenders.append(Contender(text, pattern, _ours(pattern, settings.impl), peer=False))
        view = peers.on_a_view(pattern, shape.n)
        if settings.peers != "none" and view is not None:
            contenders.append(Contender(f"SDPA view {text}", pattern, view, peer=True))
        if settings.peers == "all" and shape.n <= DENSE_LIMIT:
            flex = peers.flex(pattern, shape.n, device)  # It has no backward on a CPU.
            contenders.append(Contender(f"Flex {text}", pattern, flex, peer=True, differentiable=device.type != "cpu"))
    return contenders


def _ours(pattern: Pattern, impl: str) -> peers.Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern, impl=impl)

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
    limits = result.ceilings
    console.print(
        f"copy {limits.bytes_per_second / 1e12:.3f} TB/s, matrix product {limits.flops_per_second / 1e12:.3g} TFLOP/s",
        highlight=False,
    )
    for shape in dict.fromkeys(row.shape for row in result.rows):
        table = Table(
            title=shape, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
        )
        table.add_column("attention", no_wrap=True)
        for heading in ("million\npairs", "forward\nms", "with\nbackward", "peak\nMiB", "dense\n/ this", "of the\nfloor"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in (row for row in result.rows if row.shape == shape):
            table.add_row(
                row.name,
                _cell(row.pairs / 1e6),
                *(_cell(value) for value in (row.forward_ms, row.both_ms, row.peak_mib, row.faster_than_dense)),
                _share(row.forward_of_bytes, row.forward_of_flops) + " " + _share(row.both_of_bytes, row.both_of_flops),
            )
        console.print(table)
    notes = [f"{row.name} at {row.shape} did not run: {row.failure}" for row in result.rows if row.failure]
    notes += [f"{one.name}: time ~ pairs^{one.time}, memory ~ pairs^{one.memory}" for one in result.growth]
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if value < 10 else f"{value:,.1f}"


def _share(of_bytes: float | None, of_flops: float | None) -> str:
    """The floor's share of the measured time. The floor is the larger of the two minimum times."""
    return "-" if of_bytes is None or of_flops is None else f"{max(of_bytes, of_flops):.0%}"


def _ratio(above: float | None, below: float | None) -> float | None:
    return _rounded(above / below) if above and below else None


def _rounded(value: float | None, factor: float = 1) -> float | None:
    return None if value is None else round(value * factor, 4)
