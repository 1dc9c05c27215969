"""Plots of benchmarks: time against sequence length, sampling rate, training steps, and memory of long contexts.

Needs matplotlib (`pip install 'longstride[plot]'`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from longstride.common.atomic import atomic_path


class Times(Protocol):
    """Milliseconds, forward alone and with backward."""

    @property
    def forward_ms(self) -> float | None: ...
    @property
    def both_ms(self) -> float | None: ...


class Waited(Protocol):
    """Milliseconds that a caller waits for, forward alone and with backward."""

    @property
    def forward_wait_ms(self) -> float | None: ...
    @property
    def both_wait_ms(self) -> float | None: ...


class Timed(Times, Protocol):
    """A row of `longstride bench attention`. Its own times are those of the GPU's kernels alone; on a CPU, of a call."""

    @property
    def name(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def is_ours(self) -> bool: ...
    @property
    def eager(self) -> Waited | None: ...
    @property
    def compiled(self) -> Waited | None: ...


class Crossed(Protocol):
    """From which n on a contender is faster than SDPA dense, by one kind of time."""

    @property
    def name(self) -> str: ...
    @property
    def time(self) -> str: ...
    @property
    def forward(self) -> int | None: ...
    @property
    def both(self) -> int | None: ...


class Rated(Protocol):
    """A row of `longstride bench sampling`."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def is_ours(self) -> bool: ...
    @property
    def bytes_per_second(self) -> float | None: ...


class Stepped(Protocol):
    """A row of `longstride bench step`."""

    @property
    def name(self) -> str: ...
    @property
    def network(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def is_ours(self) -> bool: ...
    @property
    def plain_ms(self) -> float | None: ...
    @property
    def captured_ms(self) -> float | None: ...
    @property
    def matrix_share(self) -> float | None: ...


class Trained(Protocol):
    """A row of `longstride bench memory`."""

    @property
    def context(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def predicted_gib(self) -> float | None: ...
    @property
    def measured_gib(self) -> float | None: ...
    @property
    def losses(self) -> list[float]: ...


KERNELS, CALLER, COMPILED = "kernels", "caller", "compiled caller"
"""The kinds of time, as `Crossed.time` has them."""


COLOURS = (*(f"C{number}" for number in range(10)), "black", "navy", "maroon", "darkgreen", "indigo", "olive")
"""Of contenders, in their order."""
ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False, "fontsize": 9}
"""Options of a legend above its panel."""


def plot_times(rows: Sequence[Timed], path: str | Path, on_gpu: bool = False, crossings: Sequence[Crossed] = ()) -> None:
    """Draws the time of each contender against n, forward alone and with backward, both axes logarithmic.

    GPU times are the upper two panels and a caller's times the lower two, dotted where the call is compiled. Rings mark
    `crossings`.
    """
    panels = {KERNELS: "GPU time: kernels alone, ms" if on_gpu else "milliseconds"}
    if any(row.eager or row.compiled for row in rows):
        panels[CALLER] = "a caller's time: Python included, ms"
    figure = Figure(figsize=(11, 0.8 + 4.4 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 2, sharex=True, sharey=True, squeeze=False)
    notes = []
    for pair, (kind, label) in zip(grid, panels.items()):
        for axes, title, direction in zip(pair, ("forward", "forward and backward"), ("forward", "both")):
            for time in (kind,) if kind == KERNELS else (CALLER, COMPILED):
                _plot_kind(axes, rows, time, direction, crossings)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.set_yscale("log")
            axes.set_title(title, fontsize=12)
            axes.grid(which="both", color="#e4e8ec", linewidth=0.5)
        pair[0].set_ylabel(label)
    if any(row.compiled for row in rows):
        notes.append("dotted: compiled with torch.compile")
    if any(crossing.forward or crossing.both for crossing in crossings):
        notes.append("ring: faster than SDPA dense from this n on")
    for axes in grid[-1]:
        axes.set_xlabel("n")
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=9)
    legend = figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)


def _plot_kind(axes: Axes, rows: Sequence[Timed], time: str, direction: str, crossings: Sequence[Crossed]) -> None:
    """One kind of time in one direction, a line for each contender."""
    starts = {crossing.name: getattr(crossing, direction) for crossing in crossings if crossing.time == time}
    for number, name in enumerate(dict.fromkeys(row.name for row in rows)):
        points = {}
        for row in rows:
            times = {KERNELS: row, CALLER: row.eager, COMPILED: row.compiled}[time]
            milliseconds = getattr(times, f"{direction}_ms" if time == KERNELS else f"{direction}_wait_ms", None)
            if row.name == name and milliseconds:
                points[row.n] = milliseconds
        if not points:
            continue
        ours, colour = any(row.is_ours for row in rows if row.name == name), COLOURS[number % len(COLOURS)]
        axes.plot(
            *zip(*sorted(points.items())), label=name, color=colour, marker="o" if ours else "x",
            linestyle=":" if time == COMPILED else "-" if ours else "--", linewidth=2 if ours else 1,
        )  # fmt: skip
        start = starts.get(name)
        if start in points:
            axes.plot([start], [points[start]], color=colour, marker="o", markersize=12, fillstyle="none")


def plot_rates(rows: Sequence[Rated], path: str | Path) -> None:
    """Draws bytes per second of each contender on a logarithmic axis: against the position, with a panel per batch; or
    against the batch, if there is only one position."""
    by_batch = len({row.position for row in rows}) == 1
    batches = [None] if by_batch else list(dict.fromkeys(row.batch for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    figure = Figure(figsize=(2.5 + 4.2 * len(batches), 4.8), layout="constrained")
    for axes, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches):
        for number, name in enumerate(names):
            points = sorted(
                (row.batch if by_batch else row.position, row.bytes_per_second)
                for row in rows
                if row.name == name and row.bytes_per_second and batch in (None, row.batch)
            )
            ours = any(row.is_ours for row in rows if row.name == name)
            axes.plot(
                [at for at, _ in points], [rate for _, rate in points], label=name, color=f"C{number}",
                marker="o" if ours else "x", linestyle="-" if ours else "--", linewidth=2 if ours else 1,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.6g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"position {rows[0].position:,}" if batch is None else f"streams: {batch:,}", fontsize=12)
        axes.set_xlabel("streams" if by_batch else "position")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.grid(which="both", color="#e4e8ec", linewidth=0.5)
    figure.axes[0].set_ylabel("bytes per second, all streams")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)


def plot_steps(rows: Sequence[Stepped], path: str | Path) -> None:
    """Draws milliseconds of a training step as bars, a panel for each network: captured in full colour, and what launching
    kernel by kernel adds in pale."""
    networks = list(dict.fromkeys(row.network for row in rows))
    counts = [sum(row.network == network for row in rows) for network in networks]
    figure = Figure(figsize=(10, 1 + sum(0.42 * count + 0.8 for count in counts)), layout="constrained")
    panels = figure.subplots(len(networks), 1, squeeze=False, height_ratios=[count + 1 for count in counts])[:, 0]
    for axes, network in zip(panels, networks):
        own = [row for row in rows if row.network == network]
        most = max((row.plain_ms or 0 for row in own), default=0) or 1
        for place, row in enumerate(own):
            colour = "C0" if row.is_ours else "#8a949e"
            fast = row.plain_ms if row.captured_ms is None else row.captured_ms
            if row.plain_ms is None or fast is None:
                axes.text(0, place, " did not run", va="center", fontsize=9)
                continue
            axes.barh(place, row.plain_ms, color=colour, alpha=0.3)
            axes.barh(place, min(fast, row.plain_ms), color=colour)
            share = "" if row.matrix_share is None else f", {row.matrix_share:.0%} of the matrix rate"
            axes.text(max(fast, row.plain_ms) + most / 100, place, f"{fast:,.0f} ms{share}", va="center", fontsize=9)
        axes.set_yticks(range(len(own)), [row.name for row in own])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.5 * most)
        axes.set_title(f"{network}: {own[0].batch} x {own[0].context:,} bytes", fontsize=11, loc="left", parse_math=False)
        axes.grid(axis="x", color="#e4e8ec", linewidth=0.5)
        axes.set_axisbelow(True)
    captured = any(row.captured_ms is not None for row in rows)
    panels[-1].set_xlabel("milliseconds a step" + ("; pale: kernel by kernel, full: as one CUDA graph" if captured else ""))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)


def plot_memory(rows: Sequence[Trained], path: str | Path, limit_gib: float, paper: Mapping[int, int]) -> None:
    """Draws, for each context, predicted and measured memory, parameters beside those of `paper`, and the losses."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    memory, parameters, losses = figure.subplots(1, 3)
    places = range(len(rows))
    for axes in (memory, parameters):
        axes.set_xticks(places, [f"{row.context:,}" for row in rows])
        axes.set_xlabel("context, bytes")
    for shift, name, colour in ((-0.2, "predicted", "#b9c3cc"), (0.2, "measured", "C0")):
        sizes = [getattr(row, f"{name}_gib") or 0 for row in rows]
        memory.bar([place + shift for place in places], sizes, 0.38, label=name, color=colour)
    memory.axhline(limit_gib, color="C3", linewidth=1, label="limit")
    memory.set_ylabel("peak GiB of the GPU")
    memory.legend(**ABOVE, ncols=3)
    counts = {"the paper, 16 GB": [paper.get(row.context, 0) for row in rows], "here": [row.parameters for row in rows]}
    for shift, colour, (name, numbers) in zip((-0.2, 0.2), ("#b9c3cc", "C0"), counts.items()):
        parameters.bar([place + shift for place in places], [x / 1e6 for x in numbers], 0.38, color=colour, label=name)
    parameters.set_ylabel("million parameters")
    parameters.legend(**ABOVE, ncols=2)
    for number, row in enumerate(rows):
        if row.losses:
            losses.plot(range(1, 1 + len(row.losses)), row.losses, marker="o", color=f"C{number}", label=f"{row.context:,}")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.set_xlabel("step; a line for each context")
    losses.set_ylabel("loss, nats")
    losses.legend(**ABOVE, ncols=3)
    for axes in (memory, parameters, losses):
        axes.grid(axis="y", color="#e4e8ec", linewidth=0.5)
        axes.set_axisbelow(True)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)
