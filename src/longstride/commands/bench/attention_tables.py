"""Tables and lines that `longstride bench attention` prints."""

from rich.console import Console

from longstride.commands.bench.peers import SDPA_DENSE
from longstride.commands.bench.report import print_lines, print_machine, print_table
from longstride.commands.bench.results import CALLERS, CallerTimes, Crossing, Result, Row

TITLES = {
    "kernels": "GPU time: kernels alone",
    "caller": "a caller's time: elapsed (triton's do_bench), and of the host until a call returns",
    "compiled caller": "a caller's time under torch.compile(fullgraph=True)",
}


def show(result: Result, console: Console) -> None:
    limits = result.ceilings
    rates = f"copy {limits.bytes_per_second / 1e12:.3f} TB/s, matrix product {limits.flops_per_second / 1e12:.3g} TFLOP/s"
    print_machine(console, result.machine, rates)
    for shape in dict.fromkeys(row.shape for row in result.rows):
        rows = [row for row in result.rows if row.shape == shape]
        title = f"{shape}, {TITLES['kernels']}" if result.on_gpu else shape
        print_table(console, title, NAMES, KERNEL_HEADINGS, map(_kernel_cells, rows))
        for clock in ("caller", "compiled caller"):
            cells = _caller_cells(rows, clock)
            if cells:
                print_table(console, f"{shape}, {TITLES[clock]}", NAMES, CALLER_HEADINGS, cells)
    print_lines(console, _notes(result))


NAMES = ("attention",)
KERNEL_HEADINGS = ("million\npairs", "forward\nms", "with\nbackward", "peak\nMiB", "dense\n/ this", "of the\nfloor")
CALLER_HEADINGS = ("elapsed, ms", "dense / this", "host, us")
"""Of pairs: forward, and with backward."""


def _kernel_cells(row: Row) -> list[str]:
    return [
        row.name,
        _cell(row.pairs / 1e6),
        *(_cell(value) for value in (row.forward_ms, row.both_ms, row.peak_mib, row.faster_than_dense)),
        _share(row.forward_of_bytes, row.forward_of_flops) + " " + _share(row.both_of_bytes, row.both_of_flops),
    ]


def _caller_cells(rows: list[Row], clock: str) -> list[list[str]]:
    timed = {row.name: times for row in rows if (times := CALLERS[clock](row)) is not None}
    dense = timed.get(SDPA_DENSE, CallerTimes())
    return [
        [
            name,
            _pair(times.forward_ms, times.both_ms),
            _pair(_times_as_fast(dense.forward_ms, times.forward_ms), _times_as_fast(dense.both_ms, times.both_ms)),
            _pair(times.host_forward_us, times.host_both_us),
        ]
        for name, times in timed.items()
    ]


def _notes(result: Result) -> list[str]:
    notes = [f"left out: {reason}" for reason in result.left_out]
    notes += [f"{row.name} at {row.shape} did not run, {row.failure}" for row in result.rows if row.failure]
    notes += [f"{growth.name}: time ~ pairs^{growth.time}, memory ~ pairs^{growth.memory}" for growth in result.growth]
    notes += [crossing_line(crossing, result.on_gpu) for crossing in result.crossings]
    return notes


def crossing_line(crossing: Crossing, on_gpu: bool) -> str:
    """Such as: local(128): faster than SDPA dense from n = 256 forward, from n = 1,024 with backward (a caller's time)"""
    sides = {"forward": crossing.forward, "with backward": crossing.both}
    texts = [f"from n = {n:,} {side}" if n else f"not up to n = {crossing.longest:,} {side}" for side, n in sides.items()]
    kinds = {"kernels": "GPU time", "caller": "a caller's time", "compiled caller": "a caller's time, compiled"}
    kind = f" ({kinds[crossing.time]})" if on_gpu or crossing.time != "kernels" else ""
    return f"{crossing.name}: faster than SDPA dense {', '.join(texts)}{kind}"


def _times_as_fast(dense: float | None, this: float | None) -> float | None:
    return dense / this if dense and this else None


def _pair(first: float | None, second: float | None) -> str:
    return f"{_cell(first)} / {_cell(second)}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if value < 10 else f"{value:,.1f}"


def _share(of_bytes: float | None, of_flops: float | None) -> str:
    """How near the time is to the floor, which is the later of the two: the share that it reaches."""
    return "-" if of_bytes is None or of_flops is None else f"{max(of_bytes, of_flops):.0%}"
