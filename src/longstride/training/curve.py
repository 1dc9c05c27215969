"""Loss curve of a run. Needs matplotlib (`pip install 'longstride[plot]'`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstride.common.figures import drawable, new_figure, picture_path, write_figure
from longstride.common.files import check_run_folder, real_path
from longstride.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

OWNER = "plot run"
LIGHT, DARK, RATE = "#a9cbe8", "#0b2545", "#e3a857"
ROOM = 0.08
"""Of the width, for the number behind the last point."""
Rows = list[dict[str, Any]]


def plot_curve(folder: str | Path, path: str | Path | None = None) -> Path:
    """Draws bits per byte of training and validation, and the learning rate below. Default path: curve.png in the run."""
    folder = Path(folder)
    if path is None:
        check_run_folder(OWNER, folder)
        path = folder / "curve.png"
    path = picture_path(OWNER, path)
    figure = new_figure(OWNER, 8, 5.4, layout="constrained")
    rows = read_rows(folder)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    draw_bits(above, rows)
    above.set_title(drawable(real_path(folder).name), parse_math=False)
    above.legend(frameon=False)
    draw_line(below, rows, "learning_rate", RATE)
    below.set_ylabel("learning rate")
    finish([above, below])
    write_figure(figure, path)
    return path


def read_rows(folder: Path) -> Rows:
    rows = read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder} has no steps to draw yet")
    return rows


def draw_bits(
    axes: "Axes", rows: Rows, light: str = LIGHT, dark: str = DARK, labels: tuple[str, str] = ("training", "validation")
) -> None:  # fmt: skip
    """Draws training as a light line, and validation as a dark one with its last value."""
    from matplotlib.patheffects import withStroke

    draw_line(axes, rows, "bits_per_byte", light, label=labels[0])
    validated = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    if validated:
        draw_line(axes, rows, "valid_bits_per_byte", dark, marker="o", markersize=4, label=labels[1])
        step, last = validated[-1]["step"], validated[-1]["valid_bits_per_byte"]
        # Right of the last point, where the run's own lines end.
        number = axes.annotate(
            f"{last:.3f}", (step, last), xytext=(7, 0), textcoords="offset points", ha="left", va="center", color=dark,
            zorder=5,
        )  # fmt: skip
        number.set_path_effects([withStroke(linewidth=3, foreground="white")])  # Readable on top of a line.
        axes.update_datalim([(step + ROOM * (step - rows[0]["step"]), last)])
    axes.set_ylabel("bits per byte")


def draw_line(axes: "Axes", rows: Rows, name: str, colour: str, **options: Any) -> None:
    """Draws one metric over steps, where it was logged; a dot where that was once, as a line needs two points."""
    known = [row for row in rows if row.get(name) is not None]
    if len(known) == 1:
        options = {"marker": "o", "markersize": 4, **options}
    axes.plot([row["step"] for row in known], [row[name] for row in known], color=colour, **options)


def separate_numbers(axes: "Axes") -> None:
    """Moves the last values of runs up where they would cover each other."""
    from matplotlib.text import Annotation

    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.get_ylim()  # Brings the limits up to date, on which places depend.
    boxes: list[Bbox] = []
    numbers = [text for text in axes.texts if isinstance(text, Annotation)]
    for number in sorted(numbers, key=lambda number: number.get_window_extent().y0):
        first = box = number.get_window_extent()
        for other in sorted(boxes, key=lambda other: other.y0):
            if box.overlaps(other):
                box = first.translated(0, other.y1 + 1 - first.y0)
        boxes.append(box)
        right, up = number.xyann
        number.xyann = right, up + (box.y0 - first.y0) * 72 / figure.dpi


def finish(column: list["Axes"]) -> None:
    """Styles axes that share the step axis; the last one has its label."""
    from matplotlib.ticker import MaxNLocator

    column[-1].set_xlabel("step")
    column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in column:
        axes.grid(color="#ececec")
        axes.set_axisbelow(True)
