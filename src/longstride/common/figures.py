"""Figure style: matplotlib, which is optional; files that appear whole; places in inches from the top left."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstride.common.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def picture_path(owner: str, path: str | Path) -> Path:
    """`path`, if it ends as a picture that can be written."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{owner}: {path} must end in {' or '.join(FORMATS)}")
    return path


def new_figure(owner: str, width: float, height: float, **options: Any) -> "Figure":
    """An empty figure of that many inches, or an error that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"{owner} needs {error.name}, which is not installed: pip install 'longstride[plot]'") from None
    return Figure(figsize=(width, height), **options)


def write_figure(figure: "Figure", path: Path, dpi: int = 150) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=dpi)


INK, QUIET = "#0b2545", "#66717d"
EDGE, GAP = 0.2, 0.14
MONO = 0.602
"""How wide a letter of the monospaced font is, as a part of its size."""


def add_axes(figure: "Figure", left: float, top: float, width: float, height: float, bare: bool = True) -> "Axes":
    across, down = figure.get_figwidth(), figure.get_figheight()
    axes = figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))
    if bare:
        axes.tick_params(length=0, labelleft=False, labelbottom=False)
    return axes


def add_text(
    figure: "Figure", left: float, down: float, text: str, size: float, colour: str = INK, within: float | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """On a line that is so far down; smaller if it is too long for `within`. Names and data are no formulas."""
    if within is not None and text:
        size = min(size, within * 72 / (MONO * len(text)))
    across, whole = figure.get_figwidth(), figure.get_figheight()
    figure.text(left / across, 1 - down / whole, text, fontsize=size, color=colour, parse_math=False, **options)


def letters(inches: float, size: float) -> int:
    """How many monospaced letters of that size fit."""
    return int(inches * 72 / (MONO * size))
