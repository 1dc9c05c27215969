"""Time and memory of our patterns beside the alternatives, at any shape or at those of the paper's data sets.

longstride bench attention --lengths 256 1024 4096 16384 --patterns 'merged(strided(128))' --compile 1024 --json result.json
longstride bench attention --shapes enwik8 cifar10 --json result.json
longstride bench attention --read result.json --picture times.png
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import FunctionType

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from longstride.attention import attend
from longstride.attention.implementation import choose
from longstride.commands.bench import peers
from longstride.commands.bench.attention_tables import show
from longstride.commands.bench.checks import ALL, Shape, check_attention
from longstride.commands.bench.measure import (
    Call,
    Ceilings,
    Clock,
    Context,
    Pick,
    ceilings,
    elapsed_seconds,
    host_seconds,
    peak_bytes,
    seconds_each,
)
from longstride.commands.bench.peers import Attention, Contender
from longstride.commands.bench.report import plain, reason_of, save
from longstride.commands.bench.results import CallerTimes, Result, Row, conclude, read_result
from longstride.commands.bench.settings import AttentionBenchmark
from longstride.common.device import choose_device, describe_machine, keep_freed_memory
from longstride.patterns import Pattern
from longstride.patterns.notation import parse

DENSE_LIMIT = 2**17
"""Past this length dense attention and masks of FlexAttention take too long, or too much memory, to be waited for."""
CALLER_ROUNDS = 3
"""The most rounds for a caller's times: each round is a median or mean of many calls."""


@dataclass
class Calls:
    """The calls of all contenders at one shape, by name, and why some are not there."""

    forward: dict[str, Call] = field(default_factory=dict)
    both: dict[str, Call] = field(default_factory=dict)
    within: dict[str, Context] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run(settings: AttentionBenchmark, console: Console | None = None) -> Result:
    """Measures, prints tables, and writes JSON if asked to."""
    console = console or Console()
    if settings.read is not None:
        check_attention(settings)
        result = read_result(settings.read)
        save(result, settings.json)
        show(result, console)
        return result
    shapes = check_attention(settings)
    device = choose_device("bench attention", settings.device)
    try:
        choose(settings.impl, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    keep_freed_memory()
    dtype = _dtype(settings.dtype, device)
    limits = ceilings(dtype, device)
    result = Result(describe_machine(device), plain(settings), limits, left_out=_left_out(settings, device))
    compiled_shapes = [shape for shape in shapes if {ALL, shape.name, str(shape.n)}.intersection(settings.compile)]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(shapes) + len(compiled_shapes))
        # Saved as they come, compiled ones last: what follows may take too long, or too much memory.
        for shape in shapes:
            progress.update(task, description=shape.name)
            result.rows.extend(_measure(settings, shape, dtype, device, limits))
            conclude(result)
            save(result, settings.json)
            progress.advance(task)
        for shape in compiled_shapes:
            progress.update(task, description=f"{shape.name}, compiled")
            result.rows[:] = _with_compiled(result.rows, settings, shape, dtype, device)
            conclude(result)
            save(result, settings.json)
            progress.advance(task)
    show(result, console)
    return result


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _left_out(settings: AttentionBenchmark, device: torch.device) -> list[str]:
    """Returns a line for each requested peer that cannot run on this device."""
    wanted = {"none": (), "sdpa": (peers.VARLEN,), "all": (peers.VARLEN, peers.FLEX_FLASH)}[settings.peers]
    return [f"{name}: {reason}" for name, reason in peers.missing(device).items() if name in wanted]


def _measure(
    settings: AttentionBenchmark, shape: Shape, dtype: torch.dtype, device: torch.device, limits: Ceilings
) -> list[Row]:
    inputs = _inputs(shape, dtype, device)
    torch.compiler.reset()  # Compiled code of earlier shapes would only be in the way.
    contenders = _contenders(settings, shape, device)
    calls = Calls()
    for contender in contenders:
        _try(contender, contender.call, inputs, calls)
    with torch.no_grad():
        forward_times = seconds_each(calls.forward, settings.repeats, device, within=calls.within)
    both_times = seconds_each(calls.both, settings.repeats, device, within=calls.within)
    peaks = {}
    for name, call in calls.both.items():
        with calls.within[name]():
            peaks[name] = peak_bytes(call, device)
    eager = _caller_times(calls, settings.repeats, device) if device.type == "cuda" else {}
    dense = both_times.get(peers.SDPA_DENSE)
    # Forward moves q, k, v and the output; backward those, the output's gradient and three more.
    moved = (inputs[0].nbytes + inputs[2].nbytes) * 2 / limits.bytes_per_second
    rows = []
    for contender in contenders:
        forward_time, both_time = forward_times.get(contender.name), both_times.get(contender.name)
        pairs = contender.pattern.pairs(shape.n)
        # A product with the key and one with the value forward, and five more backward.
        products = [2 * shape.batch * shape.heads * pairs * d / limits.flops_per_second for d in (shape.d_qk, shape.d_v)]
        rows.append(
            Row(
                shape=shape.name,
                n=shape.n,
                name=contender.name,
                pattern=repr(contender.pattern),
                pairs=pairs,
                forward_ms=_rounded(forward_time, 1e3),
                both_ms=_rounded(both_time, 1e3),
                peak_mib=_rounded(peaks.get(contender.name), 2**-20),
                faster_than_dense=_ratio(dense, both_time),
                forward_of_bytes=_ratio(moved, forward_time),
                both_of_bytes=_ratio(3 * moved, both_time),
                forward_of_flops=_ratio(sum(products), forward_time),
                both_of_flops=_ratio(4 * products[0] + 3 * products[1], both_time),
                failure=calls.failures.get(contender.name),
                eager=eager.get(contender.name),
            )
        )
    return rows


def _try(contender: Contender, call: Attention, inputs: list[Tensor], calls: Calls, what: str = "") -> None:
    """Runs a contender once in each direction, and notes those that work. A peer may not run here at all: FlexAttention
    needs a C++ compiler on a CPU, for one. Ours may lack memory, or a compiler; any other failure of ours is raised."""
    *given, slopes = (contender.arrange(x) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in given]
    directions: dict[str, Call] = {"forward": lambda: call(*given)}
    if contender.differentiable:
        directions["backward"] = lambda: torch.autograd.grad(call(*leaves), leaves, slopes)
    calls.within[contender.name] = contender.within
    for direction, attempt in directions.items():
        try:
            with contender.within(), torch.set_grad_enabled(direction == "backward"):
                attempt()
        except Exception as error:
            if contender.ours and not what and not isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            calls.failures[contender.name] = f"{what}{direction}: {reason_of(error)}"
            if slopes.is_cuda:
                torch.cuda.empty_cache()
            return
        (calls.forward if direction == "forward" else calls.both)[contender.name] = attempt


def _caller_times(calls: Calls, repeats: int, device: torch.device) -> dict[str, CallerTimes]:
    """The median elapsed time of each call; on a GPU the host's least time, too."""
    rounds, on_gpu = min(repeats, CALLER_ROUNDS), device.type == "cuda"
    clocks: dict[str, tuple[Clock | None, Pick]] = {"elapsed": (elapsed_seconds if on_gpu else None, median)}
    if on_gpu:
        clocks["host"] = host_seconds, min
    times: dict[tuple[str, str], dict[str, float]] = {}
    for name, (clock, pick) in clocks.items():
        with torch.no_grad():
            times[name, "forward"] = seconds_each(calls.forward, rounds, device, clock, calls.within, pick)
        times[name, "both"] = seconds_each(calls.both, rounds, device, clock, calls.within, pick)
    return {
        name: CallerTimes(
            forward_ms=_rounded(times["elapsed", "forward"].get(name), 1e3),
            both_ms=_rounded(times["elapsed", "both"].get(name), 1e3),
            host_forward_us=_rounded(times.get(("host", "forward"), {}).get(name), 1e6, 1),
            host_both_us=_rounded(times.get(("host", "both"), {}).get(name), 1e6, 1),
        )
        for name in calls.forward
    }


def _with_compiled(
    rows: Sequence[Row], settings: AttentionBenchmark, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[Row]:
    """The rows; those of this shape with times under torch.compile, if their contenders have them."""
    torch.compiler.reset()
    calls, inputs = Calls(), _inputs(shape, dtype, device)
    ran = {row.name for row in rows if row.shape == shape.name and row.forward_ms is not None}
    for contender in _contenders(settings, shape, device):
        if contender.compiled and contender.name in ran:
            _try(contender, _compiled(contender.call), inputs, calls, "compiled ")
    times = _caller_times(calls, settings.repeats, device)
    return [
        replace(row, compiled=times.get(row.name), failure=row.failure or calls.failures.get(row.name))
        if row.shape == shape.name
        else row
        for row in rows
    ]


def _compiled(call: Attention) -> Attention:
    """Each has a code object of its own: torch.compile keeps compiled code by code object, and a call checks all that its
    code object has, those of other contenders included."""

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v)

    copy = FunctionType(own.__code__.replace(), own.__globals__, closure=own.__closure__)
    made: Attention = torch.compile(copy, fullgraph=True, dynamic=False)
    return made


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries, keys, values and the output's gradient."""
    return [
        torch.randn(shape.batch, shape.heads, shape.n, d, device=device).to(dtype)
        for d in (shape.d_qk, shape.d_qk, shape.d_v, shape.d_v)
    ]


def _contenders(settings: AttentionBenchmark, shape: Shape, device: torch.device) -> list[Contender]:
    contenders: list[Contender | None] = []
    missing = peers.missing(device)
    short = shape.n <= DENSE_LIMIT
    if settings.peers != "none" and short:
        contenders += peers.dense(device)
    for text in shape.patterns:
        (pattern,) = parse(text)
        contenders.append(Contender(text, pattern, _ours(pattern, settings.impl), ours=True, compiled=True))
        if settings.peers != "none":
            contenders.append(peers.on_a_view(text, pattern, shape.n))
        if settings.peers != "none" and peers.VARLEN not in missing:
            contenders.append(peers.varlen(text, pattern, shape.batch, shape.n, device))
        if settings.peers == "all" and short:
            contenders.append(peers.flex(text, pattern, shape.n, device))
        if settings.peers == "all" and short and peers.FLEX_FLASH not in missing:
            contenders.append(peers.flex(text, pattern, shape.n, device, "FLASH"))
    return [contender for contender in contenders if contender is not None]


def _ours(pattern: Pattern, impl: str) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern, impl=impl)

    return call


def _ratio(above: float | None, below: float | None) -> float | None:
    return _rounded(above / below) if above and below else None


def _rounded(value: float | None, factor: float = 1, digits: int = 4) -> float | None:
    return None if value is None else round(value * factor, digits)
