"""The loss curve of a run, as a picture. It needs matplotlib (`pip install 'longstride[plot]'`)."""

from pathlib import Path

from longstride.atomic import atomic_path
from longstride.training.run import read_metrics


def plot_curve(folder: str | Path, path: str | Path | None = None) -> Path:
    """Draws bits per byte of training and validation, and the learning rate below; curve.png in the run, unless told."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ValueError(f"plot run needs {error.name}, which is not installed: pip install 'longstride[plot]'") from None
    folder = Path(folder)
    path = Path(path) if path is not None else folder / "curve.png"
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"plot run: {path} must end in .png or .svg")
    rows = read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder} has no steps to draw yet")
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    above.plot(
        [row["step"] for row in trained], [row["bits_per_byte"] for row in trained], color="#a9cbe8", label="training"
    )
    validated = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    if validated:
        steps, bits = [row["step"] for row in validated], [row["valid_bits_per_byte"] for row in validated]
        above.plot(steps, bits, color="#0b2545", marker="o", markersize=4, label="validation")
        above.annotate(
            f"{bits[-1]:.3f}", (steps[-1], bits[-1]), xytext=(-4, 8), textcoords="offset points", ha="right", color="#0b2545"
        )
    above.set_ylabel("bits per byte")
    above.set_title(folder.resolve().name, parse_math=False)
    above.legend(frameon=False)
    rated = [row for row in rows if "learning_rate" in row]
    below.plot([row["step"] for row in rated], [row["learning_rate"] for row in rated], color="#e3a857")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(color="#ececec")
        axes.set_axisbelow(True)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return path
