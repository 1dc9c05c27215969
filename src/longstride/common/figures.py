"""Figure style. matplotlib is optional; files are written atomically; positions are inches from the top left."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

from longstride.common.atomic import atomic_path
from longstride.common.checks import REPLACEMENT
from longstride.common.lazy import import_optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def picture_path(owner: str, path: str | Path) -> Path:
    """Returns `path` if its suffix is a picture format that can be written; ValueError otherwise."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{owner}: {path} must end in {' or '.join(FORMATS)}")
    return path


def new_figure(owner: str, width: float, height: float, **options: Any) -> "Figure":
    """Returns an empty figure of this size in inches; ValueError with the pip command if matplotlib is missing."""
    figure: Figure = import_optional("matplotlib.figure", owner, "plot").Figure(figsize=(width, height), **options)
    return figure


def write_figure(figure: "Figure", path: Path, dpi: int = 150) -> None:
    """Writes the figure atomically, in the format of the path's suffix. A letter that no font has is drawn as a box."""
    with atomic_path(path) as temporary, catch_warnings():
        filterwarnings("ignore", r"(?s)Glyph .* missing from font")
        figure.savefig(temporary, dpi=dpi)


def drawable(text: str) -> str:
    """Replaces the bytes of a file's name that are no text; matplotlib refuses them."""
    return "".join(REPLACEMENT if "\ud800" <= letter <= "\udfff" else letter for letter in text)


INK, QUIET = "#0b2545", "#66717d"
"""Colours of text: important, and secondary."""
EDGE, GAP = 0.2, 0.14
"""Inches around a figure, and between panels."""
MONO = 0.602
"""Width of a character of the monospaced font, as a fraction of the font size."""


def add_axes(figure: "Figure", left: float, top: float, width: float, height: float, bare: bool = True) -> "Axes":
    """Adds axes at this place, in inches from the top left. `bare`: without ticks."""
    figure_width, figure_height = figure.get_figwidth(), figure.get_figheight()
    axes = figure.add_axes(
        (left / figure_width, 1 - (top + height) / figure_height, width / figure_width, height / figure_height)
    )
    if bare:
        axes.tick_params(length=0, labelleft=False, labelbottom=False)
    return axes


def add_text(
    figure: "Figure", left: float, down: float, text: str, size: float, colour: str = INK, within: float | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Adds text with its baseline at `down`, in a smaller size if it is wider than `within`. "$" starts no formula."""
    if within is not None and text:
        size = min(size, within * 72 / (MONO * len(text)))
    at = left / figure.get_figwidth(), 1 - down / figure.get_figheight()
    figure.text(*at, drawable(text), fontsize=size, color=colour, parse_math=False, **options)


def characters_that_fit(inches: float, size: float) -> int:
    """Returns how many monospaced characters of this font size fit into this width."""
    return int(inches * 72 / (MONO * size))
