"""A figure whose places are counted in inches from the top left, so that nothing overlaps, however many panels there are."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
