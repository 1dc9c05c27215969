"""Pictures of an experiment: validation bits against training bytes and time, or scores against the least context.

Needs matplotlib (`pip install 'longstride[plot]'`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from longstride.common.figures import drawable, new_figure, picture_path, write_figure

OWNER = "reproduce"
COLOURS = 10
DASHES = ("-", "--", ":")
"""Styles of the first ten rows, the next ten, and the rest."""


class Curve(Protocol):
    """A row of `longstride reproduce`."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def step_seconds(self) -> float | None: ...
    @property
    def validation_steps(self) -> list[float]: ...
    @property
    def validation_bits(self) -> list[float]: ...


def plot_curves(rows: Sequence[Curve], path: str | Path, title: str) -> Path:
    """Draws two panels for each kind of data, or one where no row has the time of a step. Seeds share their row's colour."""
    path = picture_path(OWNER, path)
    drawn = [row for row in rows if row.validation_steps]
    if not drawn:
        raise ValueError(f"{OWNER}: there are no curves to draw: no row has been trained")
    labels = ["training bytes, million"] + ["training time, seconds"] * any(row.step_seconds for row in drawn)
    kinds = list(dict.fromkeys(row.data for row in drawn))
    figure = new_figure(OWNER, 12, 0.6 + 4.2 * len(kinds), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(kinds), len(labels), sharey="row", squeeze=False)
    for panels, kind in zip(grid, kinds):
        own = [row for row in drawn if row.data == kind]
        names = list(dict.fromkeys(row.name for row in own))
        for row in own:
            place = names.index(row.name)
            bytes_seen = [step * row.batch * row.context / 1e6 for step in row.validation_steps]
            seconds = [step * (row.step_seconds or math.nan) for step in row.validation_steps]
            new = row is next(other for other in own if other.name == row.name)
            for axes, across in zip(panels, (bytes_seen, seconds)):
                axes.plot(
                    across, row.validation_bits, color=f"C{place % COLOURS}", marker="o", markersize=3,
                    linestyle=DASHES[min(place // COLOURS, len(DASHES) - 1)], label=row.name if new else "_",
                )  # fmt: skip
        panels[0].set_ylabel("bits per dim" if kind == "images" else "bits per byte")
        for axes, label in zip(panels, labels):
            axes.set_xlabel(label)
            axes.grid(color="#e4e8ec", linewidth=0.5)
            axes.set_axisbelow(True)
        panels[-1].legend(frameon=False, fontsize=8)
    write_figure(figure, path)
    return path


def plot_contexts(
    contexts: Sequence[str], lines: Sequence[tuple[str, Sequence[float | None]]], path: str | Path, title: str
) -> Path:  # fmt: skip
    """Draws bits per byte at each least context, a line for each network and the paper's as the last, which is dashed."""
    path = picture_path(OWNER, path)
    if all(one is None for _, bits in lines[:-1] for one in bits):
        raise ValueError(f"{OWNER}: there are no scores to draw: no row has been scored")
    figure = new_figure(OWNER, 7, 4.2, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    for place, (name, bits) in enumerate(lines):
        paper = place == len(lines) - 1
        axes.plot(
            range(len(contexts)), [math.nan if one is None else one for one in bits], marker="o", markersize=4,
            label=drawable(name),
            color="#6b7280" if paper else f"C{place % COLOURS}", linestyle="--" if paper else "-",
        )  # fmt: skip
    axes.set_xticks(range(len(contexts)), contexts)
    axes.set_xlabel("least context, bytes")
    axes.set_ylabel("bits per byte")
    axes.grid(color="#e4e8ec", linewidth=0.5)
    axes.set_axisbelow(True)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)  # The path of a run may have dollars.
    write_figure(figure, path)
    return path
