"""Plots of benchmarks: time against sequence length, and sampling rate.

Needs matplotlib (`pip install 'longstride[plot]'`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from longstride.common.atomic import atomic_path


class Timed(Protocol):
    """A row of `longstride bench attention`."""

    @property
    def name(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def forward_ms(self) -> float | None: ...
    @property
    def both_ms(self) -> float | None: ...


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


def plot_times(rows: Sequence[Timed], path: str | Path) -> None:
    """Draws the time of each contender against n, forward alone and with backward, both axes logarithmic."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    names = list(dict.fromkeys(row.name for row in rows))
    for axes, title, field in zip(
        figure.subplots(1, 2, sharey=True), ("forward", "forward and backward"), ("forward_ms", "both_ms")
    ):
        for number, name in enumerate(names):
            points = sorted((row.n, getattr(row, field)) for row in rows if row.name == name and getattr(row, field))
            if points:
                ours = not name.startswith(("SDPA", "Flex"))
                axes.plot(
                    *zip(*points), label=name, color=f"C{number % 10}", marker="o" if ours else "x",
                    linestyle="-" if ours else "--", linewidth=2 if ours else 1,
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("n")
        axes.grid(which="both", color="#e4e8ec", linewidth=0.5)
    figure.axes[0].set_ylabel("milliseconds")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)


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
        axes.grid(which="both", color="#e4e8ec", linewidth=0.5)
    figure.axes[0].set_ylabel("bytes per second, all streams")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=160)
